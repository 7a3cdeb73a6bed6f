"""Runs one training step on fake tensors and writes down every operator and every change of memory.

An operator of the backward pass is put down to the module whose forward operator made its autograd node: both
carry the same sequence number. A tensor's memory is followed through its storage: it is taken by the operator that
returns a storage not seen before, and given back when nobody holds the storage any more.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.profile.operators import Kind, bytes_of, flops_of, kind_of, shape_of


@dataclass
class OperatorSeen:
    layer: str
    name: str
    kind: Kind
    dtype: str
    flops: int
    bytes: int
    shape: tuple[int, ...]


@dataclass
class MemorySeen:
    """`operator` counts the operators before it; a `given_back` entry points at the one that took the memory."""

    operator: int
    bytes: int
    layer: str
    taken: int | None = None


@dataclass
class Recording:
    """One step as it happened; `marks` are words with the number of operators before them."""

    operators: list[OperatorSeen] = field(default_factory=list)
    memory: list[MemorySeen] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)  # memory entries that autograd keeps
    gradients: set[int] = field(default_factory=set)  # memory entries that became a parameter's gradient

    def mark(self, word: str) -> None:
        self.marks.append((len(self.operators), word))


class Recorder(TorchDispatchMode):
    """State of one recording: who runs, and which storage is whose."""

    def __init__(self, names: Mapping[nn.Module, str], blocks: Set[str]) -> None:
        super().__init__()
        self.recording = Recording()
        self._names = names
        self._blocks = blocks
        self._stack: list[str] = [""]
        self._node_layers: dict[int, str] = {}
        self._entries: dict[int, int] = {}  # storage -> memory entry; -1 for what was there before the step
        self._refs: dict[int, weakref.ref[Any]] = {}
        self.backward = False
        self.finished = False

    def know(self, tensors: Any) -> None:
        """Parameters, buffers and inputs are there before the step."""
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, Tensor):
                self._entries[id(leaf.untyped_storage())] = -1
                self._refs[id(leaf.untyped_storage())] = weakref.ref(leaf.untyped_storage())

    def entry_of(self, tensor: Tensor) -> int | None:
        entry = self._entries.get(id(tensor.untyped_storage()))
        return None if entry is None or entry < 0 else entry

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # questions about a tensor, such as its device
            return func(*args, **kwargs)
        layer = self._layer()
        result = func(*args, **kwargs)
        kind = kind_of(func)
        if kind != "view":
            self.recording.operators.append(
                OperatorSeen(
                    layer=layer,
                    name=func._overloadpacket.__name__,
                    kind=kind,
                    dtype=_dtype(args, result),
                    flops=flops_of(func, args, kwargs, result),
                    bytes=bytes_of(kind, (args, kwargs), result),
                    shape=shape_of(kind, func, args, result),
                )
            )
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow(leaf, layer)
        return result

    def _layer(self) -> str:
        if not self.backward:
            # Below autograd the node of this operator exists already and was the last to be numbered.
            self._node_layers.setdefault(torch.autograd._get_sequence_nr() - 1, self._stack[-1])
            return self._stack[-1]
        node = torch._C._current_autograd_node()
        return self._node_layers.get(node._sequence_nr(), "") if node is not None else ""

    def _follow(self, tensor: Tensor, layer: str) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._entries:
            return
        recording, entry = self.recording, len(self.recording.memory)
        recording.memory.append(MemorySeen(len(recording.operators), storage.nbytes(), layer))
        self._entries[key] = entry

        def given_back(_: Any) -> None:
            self._entries.pop(key, None)
            self._refs.pop(key, None)
            if self.finished:  # what the caller held on to dies after the step
                return
            size = recording.memory[entry].bytes
            recording.memory.append(MemorySeen(len(recording.operators), -size, layer, taken=entry))

        self._refs[key] = weakref.ref(storage, given_back)

    # ---- who runs

    def enter(self, module: nn.Module, _: Any) -> None:
        self._stack.append(self._names.get(module, self._stack[-1]))
        if self._stack[-1] in self._blocks and not self.backward:
            self.recording.mark(f"enter {self._stack[-1]}")

    def leave(self, *_: Any) -> None:
        left = self._stack.pop()
        if left in self._blocks and not self.backward:
            self.recording.mark(f"leave {left}")

    def keep(self, tensor: Tensor) -> Tensor:
        """Called by autograd for every tensor it saves."""
        entry = self.entry_of(tensor)
        if entry is not None:
            self.recording.saved.add(entry)
        return tensor


@contextmanager
def recording_modules(recorder: Recorder) -> Iterator[None]:
    """While it lasts, the recorder knows which module runs and what autograd saves."""
    before = hooks.register_module_forward_pre_hook(recorder.enter)
    after = hooks.register_module_forward_hook(recorder.leave, always_call=True)
    try:
        with torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda tensor: tensor):
            yield
    finally:
        before.remove()
        after.remove()


def record_step(
    model: nn.Module,
    run: Callable[[nn.Module], Tensor],
    inputs: Any,
    names: Mapping[nn.Module, str],
    blocks: Set[str] = frozenset(),
) -> Recording:
    """One forward and backward pass of a fake model; `run` computes the loss. Entering and leaving the modules in
    `blocks` is marked."""
    recorder = Recorder(names, blocks)
    recorder.know([*model.parameters(), *model.buffers(), inputs])
    recording = recorder.recording
    with recorder, recording_modules(recorder):
        recording.mark("forward")
        loss = run(model)
        recording.mark("backward")
        recorder.backward = True
        loss.backward()
    recorder.finished = True
    for parameter in model.parameters():
        if parameter.grad is not None:
            entry = recorder.entry_of(parameter.grad)
            if entry is not None:
                recording.gradients.add(entry)
    recording.mark("end")
    _order_ends(recording)
    return recording


def _order_ends(recording: Recording) -> None:
    """What dies between two operators dies in no certain order (a cache is emptied, say): put it into one, so that
    two recordings can be laid side by side. Entries that took memory keep their place: others point at them."""
    memory, begin = recording.memory, 0
    while begin < len(memory):
        end = begin + 1
        while memory[begin].taken is not None and end < len(memory) and _together(memory[begin], memory[end]):
            end += 1
        memory[begin:end] = sorted(memory[begin:end], key=lambda seen: seen.taken or 0)
        begin = end


def _together(one: MemorySeen, other: MemorySeen) -> bool:
    return other.taken is not None and one.operator == other.operator


def _dtype(args: tuple[Any, ...], result: Any) -> str:
    for leaf in (*tree_leaves(args), *tree_leaves(result)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return str(leaf.dtype).removeprefix("torch.")
    return ""
