"""Which operator and which module call used which value, in one forward pass on fake tensors.

A value is what a piece of memory holds under one layout: a view is a value made from another, a tensor handed on
untouched stays the value it was, and an operator that writes in place makes new values of everything it wrote to.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.batch import Example, split
from meshwright.errors import InputError
from meshwright.profile.fake import fake_batch, fake_model
from meshwright.profile.gpu_rules import GpuRules
from meshwright.profile.operators import flops_of
from meshwright.profile.repeats import Run, left_out, shorten


@dataclass(frozen=True)
class Ref:
    """Stands where a tensor stood in an operator's arguments."""

    value: int


@dataclass(frozen=True)
class Value:
    """`op` made it; where that is None, `source` says what was there before: `input`, `parameter` or `buffer`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    op: int | None
    source: str = ""
    name: str = ""

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Op:
    func: Any
    name: str
    call: int  # the innermost module call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    mutated: tuple[int, ...]  # the values it overwrote
    rewritten: tuple[int, ...]  # the values that stand in their place
    flops: int


@dataclass
class Call:
    """One call of a module; its operators are [begin, end)."""

    module: str
    parent: int
    inputs: tuple[int, ...]
    begin: int
    end: int = -1
    outputs: tuple[int, ...] = ()


@dataclass
class Flow:
    """`calls[0]` is the model's own."""

    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    consumers: dict[int, list[int]] = field(default_factory=dict)  # of each value, the operators that read it

    @property
    def outputs(self) -> tuple[int, ...]:
        return self.calls[0].outputs

    def root(self, value: int) -> int:
        """The value whose memory it shows: the same for all views of it."""
        while (made := self.values[value].op) is not None:
            op = self.ops[made]
            if op.rewritten:
                return op.rewritten[0]
            if not op.func.is_view:
                return value
            value = op.inputs[0]
        return value


_Key = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


class FlowRecorder(TorchDispatchMode):
    """State of one recording: which memory holds which value, and which call runs."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = Flow()
        self._stack: list[int] = []
        self._values: dict[_Key, int] = {}
        self._in_storage: dict[int, dict[_Key, int]] = {}
        self._alive: list[Any] = []  # storages, so that none's address is given out twice

    @property
    def running(self) -> str:
        return self.flow.calls[self._stack[-1]].module if self._stack else ""

    def know(self, tensor: Tensor, source: str, name: str) -> None:
        self._value(tensor, None, source, name)

    def know_all(self, tree: Any, source: str) -> None:
        for place, leaf in enumerate(_leaves(tree)):
            self.know(leaf, source, str(place))

    def values_in(self, tree: Any) -> tuple[int, ...]:
        return tuple(self._value(leaf, None) for leaf in _leaves(tree))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # questions about a tensor, such as its device
            return func(*args, **kwargs)
        flow, number = self.flow, len(self.flow.ops)
        inputs = self.values_in((args, kwargs))
        shown = tree_map(self._shown, (args, kwargs))
        written = _written(func, args, kwargs)
        result = func(*args, **kwargs)
        mutated: dict[int, int] = {}
        for tensor in written:
            mutated.update(self._overwrite(tensor, number))
        outputs = tuple(self._value(leaf, number) for leaf in _leaves(result))
        flops = flops_of(func, args, kwargs, result)
        name = func._overloadpacket.__name__
        before, after = tuple(mutated), tuple(mutated.values())
        flow.ops.append(Op(func, name, self._stack[-1], shown[0], shown[1], inputs, outputs, before, after, flops))
        for value in dict.fromkeys((*inputs, *mutated)):
            flow.consumers.setdefault(value, []).append(number)
        return result

    def _shown(self, leaf: Any) -> Any:
        return Ref(self._value(leaf, None)) if isinstance(leaf, Tensor) else leaf

    def _value(self, tensor: Tensor, op: int | None, source: str = "", name: str = "") -> int:
        """What was seen under this layout is known already, whoever shows it again."""
        storage = tensor.untyped_storage()
        key = (storage._cdata, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if key not in self._values:
            self._alive.append(storage)
            self._put(key, Value(tuple(tensor.shape), tensor.dtype, op, source, name))
        return self._values[key]

    def _put(self, key: _Key, value: Value) -> int:
        self.flow.values.append(value)
        number = len(self.flow.values) - 1
        self._values[key] = number
        self._in_storage.setdefault(key[0], {})[key] = number
        return number

    def _overwrite(self, tensor: Tensor, op: int) -> dict[int, int]:
        """Every view of the memory has a new value; by the old one."""
        made: dict[int, int] = {}
        for key, number in list(self._in_storage.get(tensor.untyped_storage()._cdata, {}).items()):
            old = self.flow.values[number]
            made[number] = self._put(key, Value(old.shape, old.dtype, op))
        return made

    def enter(self, module: str, args: Any, kwargs: Any) -> None:
        flow = self.flow
        parent = self._stack[-1] if self._stack else -1
        flow.calls.append(Call(module, parent, self.values_in((args, kwargs)), len(flow.ops)))
        self._stack.append(len(flow.calls) - 1)

    def leave(self, output: Any) -> None:
        call = self.flow.calls[self._stack.pop()]
        call.end, call.outputs = len(self.flow.ops), self.values_in(output)


def record_flow(
    model: nn.Module,
    sample: Any,
    size: int,
    runs: tuple[Run, ...] = (),
    target: str | None = None,
    evaluating: bool = False,
) -> Flow:
    """The flow of one forward pass with `size` samples. Of each run three blocks are there, under their own names."""
    mode = FakeTensorMode()
    twin = fake_model(model, mode, left_out(runs))
    names = {module: name for name, module in twin.named_modules()}
    parameters = dict(twin.named_parameters())
    buffers = dict(twin.named_buffers())
    shorten(twin, runs)
    twin.train(not evaluating)
    for module in names:
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):  # what generation keeps is no part of training
            config.use_cache = False
    example = split(fake_batch(sample, size, mode), target)
    recorder = FlowRecorder()
    for source, tensors in (("parameter", parameters), ("buffer", buffers)):
        for name, tensor in tensors.items():
            recorder.know(tensor, source, name)
    for name, value in _named(twin, example):
        for place, leaf in enumerate(leaves := _leaves(value)):
            recorder.know(leaf, "input", name if len(leaves) == 1 else f"{name}.{place}")
    try:
        # With gradients, as in training: without, some modules take another way.
        with mode, torch.enable_grad(), GpuRules(), recorder, following(names, recorder):
            twin(*example.arguments, **example.keywords)
    except (IndexError, InputError):  # a model that counts its blocks itself misses those that were left out
        raise
    except Exception as error:
        name = recorder.running
        where = f"{name or 'its forward pass'} ({type(model.get_submodule(name)).__name__})"
        raise InputError(f"the model cannot be traced in {where}: {str(error).splitlines()[0]}") from error
    return recorder.flow


@contextmanager
def following(names: dict[nn.Module, str], recorder: FlowRecorder) -> Iterator[None]:
    handles = []
    for module, name in names.items():

        def enter(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
            recorder.enter(name, args, kwargs)

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(lambda _, __, output: recorder.leave(output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _named(model: nn.Module, example: Example) -> Iterator[tuple[str, Any]]:
    """The model's arguments under the names its forward pass gives them."""
    known = [name for name, p in inspect.signature(model.forward).parameters.items() if p.kind != p.VAR_POSITIONAL]
    for place, value in enumerate(example.arguments):
        yield (known[place] if place < len(known) else str(place)), value
    yield from example.keywords.items()


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _leaves(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def _leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
