"""Records one training step, on fake or on real tensors: every operator and every change of memory.

An operator of the backward pass belongs to the forward operator that created its autograd node; the two are matched by
the sequence number of the node. A recomputed operator belongs to the forward operator that it repeats. The memory of a
tensor is followed through its storage. A storage is allocated by the operator that first returns it, and freed when
nothing references it any more.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from meshwright.blocks.operator_kinds import OperatorKind, operator_kind
from meshwright.blocks.recompute import Recompute, recompute_blocks
from meshwright.dtypes import torch_name
from meshwright.profile.operator_costs import (
    is_checkpoint_artifact,
    operator_bytes,
    operator_flops,
    operator_shape,
    operator_workspace_bytes,
)
from meshwright.profile.torch_private import (
    TorchDispatchMode,
    answer_tensor_query,
    backward_node_number,
    forward_node_number,
    operator_name,
    storage_of,
    tree_leaves,
)

# Returns a context for the forward pass, such as `GpuRules`.
RulesContext = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class OperatorOrigin:
    """The forward operator that a recorded operator belongs to.

    `forward_number` is the number of that forward operator. The recorded operator is the forward operator itself, its
    recomputation, or part of its backward function. It is -1 if unknown. `layer` is the module that ran the forward
    operator. `computes_gradient` is True for operators of backward functions.
    """

    forward_number: int
    layer: str
    computes_gradient: bool


@dataclass(frozen=True)
class RecordedUse:
    """A tensor that an operator reads or writes, see `TensorUse`. `allocation` is the index of the event that allocated
    its storage; -1 if the storage existed before the step."""

    value: int
    bytes: int
    allocation: int


@dataclass
class RecordedOperator:
    """One operator as it ran, with its costs at the batch size of the recorded step."""

    name: str
    kind: OperatorKind
    dtype: str
    flops: int
    bytes: int
    shape: tuple[int, ...]
    workspace_bytes: int
    origin: OperatorOrigin
    reads: tuple[RecordedUse, ...] = ()
    writes: tuple[RecordedUse, ...] = ()


@dataclass
class StorageEvent:
    """The allocation of a storage, or its release (then `bytes` is negative), after the first `after_operators`
    operators.

    `allocation` is None for an allocation. For a release, it is the index of the event that allocated the storage.
    """

    after_operators: int
    bytes: int
    origin: OperatorOrigin
    allocation: int | None = None


@dataclass
class StepTrace:
    """One recorded step. `saved` and `gradients` refer to allocations by their index in `memory`."""

    operators: list[RecordedOperator] = field(default_factory=list)
    memory: list[StorageEvent] = field(default_factory=list)
    backward_begin: int = 0  # number of operators before the backward pass
    blocks_begin: dict[str, int] = field(default_factory=dict)  # by block, number of operators before its forward pass
    blocks_end: dict[str, int] = field(default_factory=dict)  # by block, number of operators until its end
    saved: set[int] = field(default_factory=set)  # allocations that autograd keeps for the backward pass
    gradients: dict[int, str] = field(default_factory=dict)  # allocation -> the parameter whose gradient it became


class TraceRecorder(TorchDispatchMode):
    """Records all operators and allocations that happen within this mode as a `StepTrace` (`trace`). `names` are the
    modules' names, `blocks` the names of modules for which the trace says where they begin and end, and `rules` the
    context in which recomputations run."""

    def __init__(self, names: Mapping[nn.Module, str], blocks: Set[str], rules: RulesContext = nullcontext) -> None:
        super().__init__()
        self._rules = rules
        self.trace = StepTrace()
        self._names = names
        self._blocks = blocks
        self._stack: list[str] = [""]
        self._forward: list[OperatorOrigin] = []  # forward operators, views included, by number
        self._forward_names: list[str] = []
        self._node_origins: dict[int, OperatorOrigin] = {}
        self._next_recomputed: int | None = None  # while a block is recomputed: number of the next forward operator
        self._allocations: dict[int, int] = {}  # storage id -> index of its allocation; -1 if it existed before
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._values: dict[int, int] = {}  # storage id -> the number of its present contents
        self._value_count = 0
        self.in_backward = False
        self.is_finished = False

    def register_existing(self, tensors: Any) -> None:
        """Registers tensors that exist before the step (parameters, buffers, inputs). Their memory is not recorded as
        an allocation of the step."""
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, Tensor) and (storage := storage_of(leaf)) is not None:
                self._allocations[id(storage)] = -1
                self._storages[id(storage)] = weakref.ref(storage)

    def allocation_of(self, tensor: Tensor) -> int | None:
        """The index of the event that allocated the tensor's storage; None if the storage existed before the step."""
        storage = storage_of(tensor)
        allocation = None if storage is None else self._allocations.get(id(storage))
        return None if allocation is None or allocation < 0 else allocation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # queries about a tensor, such as its device
            return answer_tensor_query(func, args, kwargs)
        name = operator_name(func)
        origin = self._origin(name, args)
        kind = operator_kind(func)
        reads = self._uses((args, kwargs)) if kind != "view" else ()
        result = func(*args, **kwargs)
        if kind != "view":
            self.trace.operators.append(
                RecordedOperator(
                    name=name,
                    kind=kind,
                    dtype=_dtype_name(args, result),
                    flops=operator_flops(func, args, kwargs, result),
                    bytes=operator_bytes(kind, (args, kwargs), result),
                    shape=operator_shape(kind, func, args, result),
                    workspace_bytes=operator_workspace_bytes(kind, func, args, result),
                    origin=origin,
                    reads=reads,
                )
            )
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow_storage(leaf, origin)
                if kind != "view":
                    self._values.pop(id(storage_of(leaf)), None)
        if kind != "view":
            self.trace.operators[-1].writes = self._uses(result)
        return result

    def _uses(self, tensors: Any) -> tuple[RecordedUse, ...]:
        """The distinct tensors in a tree, with the numbers of their values. Contents that are new have a new number."""
        uses: dict[int, RecordedUse] = {}
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, Tensor) and (storage := storage_of(leaf)) is not None:
                key, size = id(storage), min(leaf.numel() * leaf.element_size(), storage.nbytes())
                if key not in self._values:
                    self._values[key], self._value_count = self._value_count, self._value_count + 1
                value = self._values[key]
                size = max(size, uses[value].bytes) if value in uses else size
                uses[value] = RecordedUse(value, size, self._allocations.get(key, -1))
        return tuple(uses.values())

    # ---- to which forward operator an operator belongs

    def _origin(self, name: str, args: tuple[Any, ...]) -> OperatorOrigin:
        if self._next_recomputed is not None:
            return self._recomputed_origin(name)
        if self.in_backward:
            number = backward_node_number()
            forward = self._node_origins.get(number) if number is not None else None
            return OperatorOrigin(forward.forward_number, forward.layer, True) if forward else _UNKNOWN_GRADIENT
        origin = OperatorOrigin(len(self._forward), self._stack[-1], False)
        self._node_origins.setdefault(forward_node_number(), origin)
        if not is_checkpoint_artifact(name, args):
            self._forward.append(origin)
            self._forward_names.append(name)
        return origin

    def _recomputed_origin(self, name: str) -> OperatorOrigin:
        """Returns the forward operator that a recomputed operator with this name repeats: the next one with the same
        name, because a recomputation runs the forward operators in order and leaves out those whose results were
        saved."""
        number = self._next_recomputed or 0
        while number < len(self._forward) and self._forward_names[number] != name:
            number += 1
        if number == len(self._forward):
            return OperatorOrigin(-1, self._stack[-1], False)
        self._next_recomputed = number + 1
        return self._forward[number]

    def pass_contexts(self, _: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Returns the contexts of a block's first forward pass and of its recomputation, as `torch.utils.checkpoint`
        needs them."""
        begin = 0

        @contextmanager
        def first_pass() -> Iterator[None]:
            nonlocal begin
            begin = len(self._forward)
            yield

        @contextmanager
        def recomputation() -> Iterator[None]:
            self._next_recomputed = begin
            try:
                with self._rules():  # `backward` is called outside of the rules of the first pass
                    yield
            finally:
                self._next_recomputed = None

        return first_pass(), recomputation()

    # ---- memory

    def _follow_storage(self, tensor: Tensor, origin: OperatorOrigin) -> None:
        storage = storage_of(tensor)
        key = id(storage)
        if storage is None or key in self._allocations:
            return
        trace, allocation = self.trace, len(self.trace.memory)
        trace.memory.append(StorageEvent(len(trace.operators), storage.nbytes(), origin))
        self._allocations[key] = allocation

        def on_freed(_: Any) -> None:
            self._allocations.pop(key, None)
            self._storages.pop(key, None)
            self._values.pop(key, None)
            if self.is_finished:  # tensors that the caller still references are freed after the step
                return
            size = trace.memory[allocation].bytes
            trace.memory.append(StorageEvent(len(trace.operators), -size, origin, allocation))

        self._storages[key] = weakref.ref(storage, on_freed)

    def note_all_saved(self) -> None:
        """Marks everything that is allocated now as saved. This is needed with recomputation because autograd's hooks
        do not see the tensors from which blocks start their recomputation."""
        self.trace.saved.update(allocation for allocation in self._allocations.values() if allocation >= 0)

    def note_saved(self, tensor: Tensor) -> Tensor:
        """Marks a tensor as saved and returns it. Autograd calls this function for every tensor that it saves."""
        allocation = self.allocation_of(tensor)
        if allocation is not None:
            self.trace.saved.add(allocation)
        return tensor

    # ---- which module runs

    def enter_module(self, module: nn.Module, _: Any) -> None:
        self._stack.append(self._names.get(module, self._stack[-1]))
        if self._stack[-1] in self._blocks and not self.in_backward:
            self.trace.blocks_begin[self._stack[-1]] = len(self.trace.operators)

    def leave_module(self, *_: Any) -> None:
        module = self._stack.pop()
        if module in self._blocks and not self.in_backward:
            self.trace.blocks_end[module] = len(self.trace.operators)


_UNKNOWN_GRADIENT = OperatorOrigin(-1, "", True)


@contextmanager
def recording_hooks(recorder: TraceRecorder) -> Iterator[None]:
    """Within this context, the recorder is notified of every module that is entered or left and of every tensor that
    autograd saves."""
    pre_hook = hooks.register_module_forward_pre_hook(recorder.enter_module)
    hook = hooks.register_module_forward_hook(recorder.leave_module, always_call=True)
    try:
        with torch.autograd.graph.saved_tensors_hooks(recorder.note_saved, lambda tensor: tensor):
            yield
    finally:
        pre_hook.remove()
        hook.remove()


def record_step(
    model: nn.Module,
    run: Callable[[nn.Module], Tensor],
    inputs: Any,
    names: Mapping[nn.Module, str],
    blocks: Set[str] = frozenset(),
    recompute: Recompute = "none",
    rules: RulesContext = nullcontext,
) -> StepTrace:
    """Records one forward and backward pass of a model. `run` computes the loss, within the context that `rules`
    returns. `inputs` are tensors that exist before the step. For the modules in `blocks`, the trace says where their
    forward pass begins and ends."""
    recorder = TraceRecorder(names, blocks, rules)
    recorder.register_existing([*model.parameters(), *model.buffers(), inputs])
    recompute_blocks(model, recompute, preserve_rng_state=False, pass_contexts=recorder.pass_contexts)
    trace = recorder.trace
    with recorder, recording_hooks(recorder):
        with rules():
            loss = run(model)
        trace.backward_begin = len(trace.operators)
        recorder.in_backward = True
        if recompute != "none":
            recorder.note_all_saved()
        loss.backward()
    recorder.is_finished = True
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            allocation = None if parameter.grad is None else recorder.allocation_of(parameter.grad)
            if allocation is not None:
                trace.gradients.setdefault(allocation, f"{names[module]}.{name}".lstrip("."))
    _sort_freed_storages(trace)
    return trace


def _sort_freed_storages(trace: StepTrace) -> None:
    """Sorts storages that are freed between the same two operators by the index of their allocation. Their order is not
    deterministic (when a cache is emptied, say), and traces must be comparable event by event. Allocations keep their
    index, because other events refer to it."""
    memory, begin = trace.memory, 0
    while begin < len(memory):
        end = begin + 1
        while memory[begin].allocation is not None and end < len(memory) and _freed_with(memory[begin], memory[end]):
            end += 1
        memory[begin:end] = sorted(memory[begin:end], key=lambda event: event.allocation or 0)
        begin = end


def _freed_with(event: StorageEvent, other: StorageEvent) -> bool:
    return other.allocation is not None and event.after_operators == other.after_operators


def _dtype_name(args: tuple[Any, ...], result: Any) -> str:
    """The torch name of the dtype of the first floating-point tensor among arguments and results, or "" if there is
    none."""
    for leaf in (*tree_leaves(args), *tree_leaves(result)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return torch_name(leaf.dtype)
    return ""
