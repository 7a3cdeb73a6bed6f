"""Runs one training step on fake tensors and writes down every operator and every change of memory.

An operator of the backward pass is put down to the forward operator that made its autograd node: both carry the same
sequence number. One that is computed again is put down to the one it repeats. A tensor's memory is followed through
its storage: it is taken by the operator that returns a storage not seen before, and given back when nobody holds the
storage any more.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.blocks.operator_kinds import Kind, kind_of
from meshwright.blocks.recompute import Recompute, recompute_blocks
from meshwright.profile.operators import (
    bytes_of,
    flops_of,
    of_recomputing,
    shape_of,
    workspace_of,
)

Rules = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Place:
    """Where an operator belongs: the number of the forward operator that it is, repeats or differentiates (-1: none),
    the module that ran that one, and whether it computes a gradient."""

    forward: int
    layer: str
    gradient: bool


@dataclass
class OperatorSeen:
    name: str
    kind: Kind
    dtype: str
    flops: int
    bytes: int
    shape: tuple[int, ...]
    workspace: int
    place: Place


@dataclass
class MemorySeen:
    """`operator` counts the operators before it; a `given_back` entry points at the one that took the memory."""

    operator: int
    bytes: int
    place: Place
    taken: int | None = None


@dataclass
class Recording:
    """One step as it happened; `marks` are words with the number of operators before them."""

    operators: list[OperatorSeen] = field(default_factory=list)
    memory: list[MemorySeen] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)  # memory entries that autograd keeps
    gradients: dict[int, str] = field(default_factory=dict)  # memory entries that became a parameter's gradient

    def mark(self, word: str) -> None:
        self.marks.append((len(self.operators), word))


class Recorder(TorchDispatchMode):
    """State of one recording: who runs, and which storage is whose."""

    def __init__(self, names: Mapping[nn.Module, str], blocks: Set[str], rules: Rules = nullcontext) -> None:
        super().__init__()
        self._rules = rules
        self.recording = Recording()
        self._names = names
        self._blocks = blocks
        self._stack: list[str] = [""]
        self._forward: list[Place] = []  # forward operators, views included, by number
        self._forward_names: list[str] = []
        self._node_places: dict[int, Place] = {}
        self._next_again: int | None = None  # while a block is computed again: which operator comes next
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
        name = func._overloadpacket.__name__
        place = self._place(name, args)
        result = func(*args, **kwargs)
        kind = kind_of(func)
        if kind != "view":
            self.recording.operators.append(
                OperatorSeen(
                    name=name,
                    kind=kind,
                    dtype=_dtype(args, result),
                    flops=flops_of(func, args, kwargs, result),
                    bytes=bytes_of(kind, (args, kwargs), result),
                    shape=shape_of(kind, func, args, result),
                    workspace=workspace_of(kind, func, args, result),
                    place=place,
                )
            )
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow(leaf, place)
        return result

    def _place(self, name: str, args: tuple[Any, ...]) -> Place:
        if self._next_again is not None:
            return self._place_again(name)
        if self.backward:
            node = torch._C._current_autograd_node()
            place = self._node_places.get(node._sequence_nr()) if node is not None else None
            return Place(place.forward, place.layer, True) if place else Place(-1, "", True)
        place = Place(len(self._forward), self._stack[-1], False)
        # Below autograd the node of this operator exists already and was the last to be numbered.
        self._node_places.setdefault(torch.autograd._get_sequence_nr() - 1, place)
        if not of_recomputing(name, args):
            self._forward.append(place)
            self._forward_names.append(name)
        return place

    def _place_again(self, name: str) -> Place:
        """The same operators in the same order, but for those whose results were kept."""
        number = self._next_again or 0
        while number < len(self._forward) and self._forward_names[number] != name:
            number += 1
        if number == len(self._forward):
            return Place(-1, self._stack[-1], False)
        self._next_again = number + 1
        return self._forward[number]

    def around(self, _: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The contexts of a block's first and second pass."""
        begin = 0

        @contextmanager
        def first() -> Iterator[None]:
            nonlocal begin
            begin = len(self._forward)
            yield

        @contextmanager
        def second() -> Iterator[None]:
            self._next_again = begin
            try:
                with self._rules():  # a call of `backward` leaves those of the first pass
                    yield
            finally:
                self._next_again = None

        return first(), second()

    def _follow(self, tensor: Tensor, place: Place) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._entries:
            return
        recording, entry = self.recording, len(self.recording.memory)
        recording.memory.append(MemorySeen(len(recording.operators), storage.nbytes(), place))
        self._entries[key] = entry

        def given_back(_: Any) -> None:
            self._entries.pop(key, None)
            self._refs.pop(key, None)
            if self.finished:  # what the caller held on to dies after the step
                return
            size = recording.memory[entry].bytes
            recording.memory.append(MemorySeen(len(recording.operators), -size, place, taken=entry))

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

    def keep_what_lives(self) -> None:
        """What blocks keep to start from again, autograd's hooks do not see."""
        self.recording.saved.update(entry for entry in self._entries.values() if entry >= 0)

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
    recompute: Recompute = "none",
    rules: Rules = nullcontext,
) -> Recording:
    """One forward and backward pass of a fake model; `run` computes the loss, under `rules`. Entering and leaving the
    modules in `blocks` is marked."""
    recorder = Recorder(names, blocks, rules)
    recorder.know([*model.parameters(), *model.buffers(), inputs])
    recompute_blocks(model, recompute, keep_random=False, around=recorder.around)
    recording = recorder.recording
    with recorder, recording_modules(recorder):
        recording.mark("forward")
        with rules():
            loss = run(model)
        recording.mark("backward")
        recorder.backward = True
        if recompute != "none":
            recorder.keep_what_lives()
        loss.backward()
    recorder.finished = True
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            entry = None if parameter.grad is None else recorder.entry_of(parameter.grad)
            if entry is not None:
                recording.gradients.setdefault(entry, f"{names[module]}.{name}".lstrip("."))
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
