"""`Dataflow`: which operators and module calls read and produced which values, in one forward pass on fake tensors.

A value is the content of a region of memory under one layout (offset, shape, strides, dtype). A view is a value that is
produced from another value. A tensor that a module returns unchanged keeps its value. An operator that writes in place
produces a new value for every view of the memory that it wrote to. Values, operators and module calls are referred to
by number: their index in the lists of `Dataflow`.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshwright.blocks.generation_cache import disable_generation_caches
from meshwright.errors import InputError
from meshwright.model_io.batch import ModelBatch, split_batch
from meshwright.profile.equal_blocks import EqualBlocks, remove_skipped_blocks, skipped_blocks
from meshwright.profile.fake import fake_batch, fake_model, reads_values
from meshwright.profile.gpu_rules import GpuRules
from meshwright.profile.operator_costs import operator_flops
from meshwright.profile.torch_private import (
    DataDependentOutputException,
    FakeTensorMode,
    TorchDispatchMode,
    answer_tensor_query,
    backward_node_number,
    custom_function_name,
    operator_arguments,
    operator_name,
    storage_address,
    tree_leaves,
    tree_map,
    unwrapped,
)
from meshwright.user.code import first_line

ValueSource = Literal["input", "parameter", "buffer", ""]


@dataclass(frozen=True)
class ValueRef:
    """Replaces a tensor among an operator's recorded arguments. `value` is the number of the tensor's value."""

    value: int


@dataclass(frozen=True)
class Value:
    """One value of the forward pass. `producer` is the number of the operator that produced the value. If `producer` is
    None, the value existed before the pass: `source` says whether it is an input, a parameter or a buffer, and `name`
    is its name in the model or among the arguments of the model's forward function."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    producer: int | None
    source: ValueSource = ""
    name: str = ""

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class TracedOperator:
    """One operator of the forward pass. Tensors among `args` and `kwargs` are `ValueRef`s; `inputs`, `outputs`,
    `overwritten` and `replacements` are numbers of values."""

    func: Any
    name: str
    call: int  # number of the innermost module call that the operator ran in
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    overwritten: tuple[int, ...]  # the values that the operator overwrote in place
    replacements: tuple[int, ...]  # the new values of `overwritten`, in the same order
    flops: int
    in_backward: bool  # whether it ran in a backward pass, because the model differentiates within its forward pass


@dataclass
class ModuleCall:
    """One call of a module. `parent` is the number of the enclosing call, or -1 for the call of the whole model. The
    operators that ran during the call have the numbers [begin, end)."""

    module: str
    parent: int
    inputs: tuple[int, ...]
    begin: int
    end: int = -1
    outputs: tuple[int, ...] = ()


@dataclass
class Dataflow:
    """All values, operators and module calls of a forward pass, by number. `calls[0]` is the call of the whole
    model."""

    values: list[Value] = field(default_factory=list)
    operators: list[TracedOperator] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    consumers: dict[int, list[int]] = field(default_factory=dict)  # by value, the operators that read or overwrite it
    custom_functions: dict[int, str] = field(default_factory=dict)  # by value that one returns, the function's name

    @property
    def outputs(self) -> tuple[int, ...]:
        """The values that the model returns."""
        return self.calls[0].outputs

    def root(self, value: int) -> int:
        """Returns the value that stands for all views of the same memory: the one that is no view of another value.
        After a write in place, it is one of the new values."""
        while (producer := self.values[value].producer) is not None:
            op = self.operators[producer]
            if op.replacements:
                return op.replacements[0]
            if not op.func.is_view:
                return value
            value = op.inputs[0]
        return value


_LayoutKey = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]  # storage, offset, shape, strides, dtype


class DataflowRecorder(TorchDispatchMode):
    """Records every operator that runs within this mode, and every module call that `enter` and `leave` report, as a
    `Dataflow`."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = Dataflow()
        self._stack: list[int] = []
        self._values: dict[_LayoutKey, int] = {}
        self._in_storage: dict[int, dict[_LayoutKey, int]] = {}
        self._storages: list[Any] = []  # references all storages: a freed address could be used again

    @property
    def running_module(self) -> str:
        """The name of the innermost module whose forward function runs now; empty for the model itself or if none
        runs."""
        return self.flow.calls[self._stack[-1]].module if self._stack else ""

    def register(self, tensor: Tensor, source: ValueSource, name: str) -> None:
        """Registers a tensor that exists before the forward pass."""
        self._value(tensor, None, source, name)

    def register_all(self, tree: Any, source: ValueSource) -> None:
        """Registers all tensors in a tree (nested lists, tuples and dicts), named by their position."""
        for position, leaf in enumerate(_leaves(tree)):
            self.register(leaf, source, str(position))

    def values_in(self, tree: Any) -> tuple[int, ...]:
        return tuple(self._value(leaf, None) for leaf in _leaves(tree))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # queries about a tensor, such as its device
            return answer_tensor_query(func, args, kwargs)
        flow, number = self.flow, len(self.flow.operators)
        inputs = self._inputs((args, kwargs))
        arguments, keywords = tree_map(self._reference, (args, kwargs))
        written = _written_tensors(func, args, kwargs)
        result = func(*args, **kwargs)
        replaced: dict[int, int] = {}
        for tensor in written:
            replaced.update(self._overwrite(tensor, number))
        outputs = tuple(self._value(leaf, number) for leaf in _leaves(result))
        flops = operator_flops(func, args, kwargs, result)
        flow.operators.append(
            TracedOperator(
                func=func,
                name=operator_name(func),
                call=self._stack[-1],
                args=arguments,
                kwargs=keywords,
                inputs=inputs,
                outputs=outputs,
                overwritten=tuple(replaced),
                replacements=tuple(replaced.values()),
                flops=flops,
                in_backward=backward_node_number() is not None,
            )
        )
        for value in dict.fromkeys((*inputs, *replaced)):
            flow.consumers.setdefault(value, []).append(number)
        return result

    def _inputs(self, tree: Any) -> tuple[int, ...]:
        """The values of an operator's inputs. Those that a custom autograd function has returned are noted: the
        operators inside of it do not say what its backward pass does."""
        leaves = _leaves(tree)
        values = tuple(self._value(leaf, None) for leaf in leaves)
        for leaf, value in zip(leaves, values, strict=True):
            if leaf.grad_fn is not None and (name := custom_function_name(leaf)):
                self.flow.custom_functions[value] = name
        return values

    def _reference(self, leaf: Any) -> Any:
        return ValueRef(self._value(leaf, None)) if isinstance(leaf, Tensor) else leaf

    def _value(self, tensor: Tensor, producer: int | None, source: ValueSource = "", name: str = "") -> int:
        """Returns the number of a tensor's value. A new value is added if no tensor with this memory and layout was
        registered before."""
        tensor = unwrapped(tensor)
        storage = tensor.untyped_storage()
        key = (
            storage_address(storage),
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
        )
        if key not in self._values:
            self._storages.append(storage)
            self._add(key, Value(tuple(tensor.shape), tensor.dtype, producer, source, name))
        return self._values[key]

    def _add(self, key: _LayoutKey, value: Value) -> int:
        self.flow.values.append(value)
        number = len(self.flow.values) - 1
        self._values[key] = number
        self._in_storage.setdefault(key[0], {})[key] = number
        return number

    def _overwrite(self, tensor: Tensor, producer: int) -> dict[int, int]:
        """Gives every view of the tensor's memory a new value. Returns the numbers of the new values by those of the
        old values."""
        replaced: dict[int, int] = {}
        for key, number in list(self._in_storage.get(storage_address(tensor.untyped_storage()), {}).items()):
            old = self.flow.values[number]
            replaced[number] = self._add(key, Value(old.shape, old.dtype, producer))
        return replaced

    def enter(self, module: str, args: Any, kwargs: Any) -> None:
        """Records that the module of this name is called with these arguments."""
        flow = self.flow
        parent = self._stack[-1] if self._stack else -1
        flow.calls.append(ModuleCall(module, parent, self.values_in((args, kwargs)), len(flow.operators)))
        self._stack.append(len(flow.calls) - 1)

    def leave(self, output: Any) -> None:
        """Records that the module that was entered last returns this output."""
        call = self.flow.calls[self._stack.pop()]
        call.end, call.outputs = len(self.flow.operators), self.values_in(output)


class ControlFlowError(InputError):
    """The values of tensors decide what the model's code does, so it cannot be traced. `module` is the name of the
    module whose code reads the values."""

    def __init__(self, message: str, module: str) -> None:
        super().__init__(message)
        self.module = module


def record_dataflow(
    model: nn.Module,
    sample: Any,
    size: int,
    equal_blocks: tuple[EqualBlocks, ...] = (),
    target: str | None = None,
    evaluating: bool = False,
) -> Dataflow:
    """Records one forward pass with `size` samples. The skipped blocks of `equal_blocks` do not run; all other modules
    appear under their names in `model`. If `evaluating` is True, the model is in evaluation mode."""
    mode = FakeTensorMode()
    fake = fake_model(model, mode, skipped_blocks(equal_blocks), size)
    names = {module: name for name, module in fake.named_modules()}
    parameters = dict(fake.named_parameters())
    buffers = dict(fake.named_buffers())
    remove_skipped_blocks(fake, equal_blocks)
    fake.train(not evaluating)
    disable_generation_caches(fake)
    inputs = split_batch(fake_batch(sample, size, mode), target)
    recorder = DataflowRecorder()
    for name, parameter in parameters.items():
        recorder.register(parameter, "parameter", name)
    for name, buffer in buffers.items():
        recorder.register(buffer, "buffer", name)
    for name, value in _named_arguments(fake, inputs):
        for position, leaf in enumerate(leaves := _leaves(value)):
            recorder.register(leaf, "input", name if len(leaves) == 1 else f"{name}.{position}")
    rules = GpuRules(fixes_random_scalars=False)
    try:
        # With gradients enabled, as in training, because some modules run a fused fast path without them.
        with mode, torch.enable_grad(), rules, recorder, recording_module_calls(names, recorder):
            fake(*inputs.arguments, **inputs.keywords)
    except (IndexError, InputError):  # a model that indexes its blocks by number fails without the skipped ones
        raise
    except DataDependentOutputException as error:
        raise ControlFlowError(
            f"the model cannot be traced in {_running_module(model, recorder)}, because {reads_values(error)}. So it"
            " cannot be cut into stages, and only the layers that plan.modules.splits names can be split: use the axes"
            " replicate and shard, or name splits",
            recorder.running_module,
        ) from error
    except Exception as error:
        raise InputError(
            f"the model cannot be traced in {_running_module(model, recorder)}: {first_line(error)}"
        ) from error
    return recorder.flow


def _running_module(model: nn.Module, recorder: DataflowRecorder) -> str:
    name = recorder.running_module
    return f"{name or 'its forward pass'} ({type(model.get_submodule(name)).__name__})"


@contextmanager
def recording_module_calls(names: dict[nn.Module, str], recorder: DataflowRecorder) -> Iterator[None]:
    """Within this context, every call of the modules in `names` is reported to the recorder."""
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


def _named_arguments(model: nn.Module, inputs: ModelBatch) -> Iterator[tuple[str, Any]]:
    """Yields the model's arguments with the names of its forward function's parameters."""
    names = [name for name, p in inspect.signature(model.forward).parameters.items() if p.kind != p.VAR_POSITIONAL]
    for position, value in enumerate(inputs.arguments):
        yield (names[position] if position < len(names) else str(position)), value
    yield from inputs.keywords.items()


def _written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that the operator writes to."""
    written: list[Tensor] = []
    for position, argument in enumerate(operator_arguments(func)):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += _leaves(args[position] if position < len(args) else kwargs.get(argument.name))
    return written


def _leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
