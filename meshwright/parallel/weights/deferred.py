"""Models larger than one rank's memory: built without memory, then filled parameter by parameter.

`recorded` builds a model on the meta device and notes every operation on its tensors. `materialize` runs those that
made one parameter again, in real memory and under the seed made of its name, keeps this rank's part and frees the
rest: bitwise the weights of `initialize.initialized`. What cannot be run again that way is told by name (`problems`).
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from meshwright.data.order import derive
from meshwright.errors import InputError
from meshwright.parallel.weights.initialize import init_units, memory_of
from meshwright.parallel.weights.layout import Layout, fill_from

_OTHERWISE = "build the whole model on every rank, under a plan that one rank's memory allows"


class NotRecorded(Exception):
    """Why a tensor's value cannot be made again."""


@dataclass(frozen=True)
class _Operation:
    """`written`: what it changed in place; `made`: its results in memory of their own."""

    number: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: tuple[Tensor, ...]
    made: tuple[Tensor, ...]
    places: tuple[int, ...]  # of `made` among its results
    random: bool

    def fills(self, memory: int) -> bool:
        """Whether it wrote all of a tensor's memory."""
        return any(memory_of(t) == memory and _is_whole(t) for t in (*self.written, *self.made))


@dataclass(frozen=True)
class Recording:
    """What was done to each memory, in order; and of each name of the untouched model the first name of the same
    tensor, with the tensor."""

    operations: Mapping[int, tuple[_Operation, ...]]
    tensors: Mapping[str, tuple[str, Tensor]]
    skipped: Mapping[int, str]  # by memory: functions of torch.nn.init that did nothing, unseen by us


def recorded(make: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Recording]:
    """The model on the meta device, and how its tensors were made."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        recorder, constants = _Recorder(), _Constants()
        with recorder, torch.device("meta"), constants, init_units(recorder.unit):
            try:
                model = make()
            except (NotImplementedError, RuntimeError) as error:
                raise InputError(
                    f"the model cannot be built without memory, since its code reads values ({error}): {_OTHERWISE}"
                ) from error
    operations = {key: tuple(found) for key, found in recorder.by_memory.items()}
    return model, Recording(operations, _tensors(model), constants.skipped)


def problems(module: nn.Module, recording: Recording) -> dict[str, str]:
    """By name, the tensors whose values cannot be made again, and why."""
    found: dict[str, str] = {}
    for name, (_, tensor) in recording.tensors.items():
        try:
            for _ in _order(tensor, recording):
                pass
        except NotRecorded as error:
            found[name] = str(error)
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, Tensor) and value.is_meta:
                found[f"{name}.{key}".lstrip(".")] = "it is a plain attribute: register it as a buffer"
    return found


def materialize(
    module: nn.Module,
    recording: Recording,
    layouts: Mapping[str, Layout],
    seed: int,
    device: torch.device,
) -> None:
    """Gives every parameter and buffer of `module`, which a plan may have cut and divided, real memory on `device`
    and its initial value."""
    wrong = problems(module, recording)
    if wrong:
        name, why = next(iter(wrong.items()))
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise InputError(f"{name}{more} cannot be initialized part by part: {why}; or {_OTHERWISE}")
    made: dict[int, tuple[Tensor, Tensor]] = {}  # tied tensors stay tied; the old ones are kept, as ids are reused
    with torch.random.fork_rng(), torch.no_grad():
        for name, owner, key in _places(module):
            table: dict[str, Any] = owner._parameters if key in owner._parameters else owner._buffers
            empty = table[key]
            if id(empty) not in made:
                first, whole = recording.tensors[name]
                real = torch.empty_like(empty, device=device, requires_grad=False)
                fill_from(real, layouts.get(name), _value(whole, recording, derive(seed, "weights", first)))
                if isinstance(empty, nn.Parameter):
                    real = nn.Parameter(real, empty.requires_grad)
                made[id(empty)] = (empty, real)
                made[id(real)] = (real, real)  # a module that has two names is met twice
            table[key] = made[id(empty)][1]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.by_memory: dict[int, list[_Operation]] = {}
        self._number = 0
        self._paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._paused:
            return result
        given = {memory_of(t) for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)}
        results = tree_flatten(result)[0]
        made = [(n, t) for n, t in enumerate(results) if isinstance(t, Tensor) and memory_of(t) not in given]
        args, kwargs = _aliases((args, kwargs))
        written = tuple(_written(func, args, kwargs))
        if made or written:
            random = torch.Tag.nondeterministic_seeded in func.tags
            places, results_made = tuple(n for n, _ in made), tuple(t.detach() for _, t in made)
            self._note(_Operation(self._number, func, args, kwargs, written, results_made, places, random))
        return result

    def unit(self, random: bool, function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        if not tensor.is_meta:
            self._paused = True
            try:
                function(tensor, *args, **kwargs)
            finally:
                self._paused = False
        alias = tensor.detach()
        self._note(_Operation(self._number, function, (alias, *args), kwargs, (alias,), (), (), random))

    def _note(self, operation: _Operation) -> None:
        """The operation's tensors are kept: memory that is freed would be given out again."""
        for memory in dict.fromkeys(memory_of(t) for t in (*operation.made, *operation.written)):
            self.by_memory.setdefault(memory, []).append(operation)
        self._number += 1


class _Constants(TorchFunctionMode):
    """Numbers that the model's code itself has are kept in real memory: the meta device would forget them. Some
    functions of torch.nn.init do nothing to meta tensors: where they were not caught (`init_units`), it is noted."""

    _ASKS = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]

    def __init__(self) -> None:
        super().__init__()
        self.skipped: dict[int, str] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor):
            kwargs = {"device": "cpu", **kwargs}
        result = func(*args, **kwargs)
        if func == self._ASKS and result:
            asking = sys._getframe(1).f_code
            if asking.co_filename == nn.init.__file__:
                self.skipped[memory_of(args[0])] = asking.co_name
        return result


def _aliases(values: Any) -> Any:
    """The tensors as they are now: a parameter may be given other memory later (`module.double()`)."""
    return tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, values)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (t for t in tree_flatten(value)[0] if isinstance(t, Tensor))


def _tensors(model: nn.Module) -> dict[str, tuple[str, Tensor]]:
    first: dict[int, str] = {}
    found: dict[str, tuple[str, Tensor]] = {}
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in (pair for kind in named for pair in kind):
        found[name] = (first.setdefault(id(tensor), name), tensor)
    return found


def _order(tensor: Tensor, recording: Recording, before: int | None = None) -> list[_Operation]:
    """What has to be run again to make a tensor's value: from the last random operation that filled it on, as
    `initialized` does, or from its beginning. Raises where that does not tell the value."""
    memory = memory_of(tensor)
    history = [op for op in recording.operations.get(memory, ()) if before is None or op.number < before]
    if not history and not tensor.is_meta:
        return []
    filled = [place for place, op in enumerate(history) if op.random and op.fills(memory)]
    needed = history[filled[-1] :] if filled else history
    if memory in recording.skipped:
        raise NotRecorded(f"torch.nn.init's {recording.skipped[memory]} was not seen: call it as torch.nn.init.…")
    if before is not None and any(op.random for op in needed):
        raise NotRecorded("it is computed from another random tensor: fill it in place (torch.nn.init)")
    if all(_is_empty(op.func) for op in needed):
        raise NotRecorded(
            "nothing fills it: give it a value" if needed else "its numbers come from outside: load them afterwards"
        )
    for op in needed:
        for other in _read(op):
            if memory_of(other) != memory and other.is_meta:
                _order(other, recording, op.number)
    return needed


def _read(op: _Operation) -> Iterator[Tensor]:
    yield from (t for t in tree_flatten((op.args, op.kwargs))[0] if isinstance(t, Tensor))


def _value(tensor: Tensor, recording: Recording, seed: int | None, before: int | None = None) -> Tensor:
    """A tensor's value, in memory of its own on the CPU."""
    needed = _order(tensor, recording, before)
    if not needed:
        return tensor
    memory = memory_of(tensor)
    room = torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
    if not tensor.is_meta and not any(op.random for op in needed):
        return tensor  # it was built in real memory, and not by chance

    def real(value: Any, number: int) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, Tensor):
            return value
        if memory_of(value) == memory:
            return _view(value, room)
        return _value(value, recording, None, number)

    if seed is not None:
        torch.manual_seed(seed)
    for op in needed:
        args, kwargs = tree_map(lambda value, number=op.number: real(value, number), (op.args, op.kwargs))
        results = tree_flatten(op.func(*args, **kwargs))[0]
        for place, made in zip(op.places, op.made, strict=True):
            if memory_of(made) == memory:
                _view(made, room).copy_(results[place])
    return _view(tensor, room)


def _view(tensor: Tensor, room: torch.UntypedStorage) -> Tensor:
    """The same view as a meta tensor has of its memory."""
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(room, tensor.storage_offset(), tensor.size(), tensor.stride())


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _is_empty(func: Any) -> bool:
    return isinstance(func, OpOverload) and func._schema.name.removeprefix("aten::") in (
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
    )


def _places(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Every name of a parameter or buffer, with the module that holds it, tied ones under each name."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for key, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is not None:
                yield f"{prefix}.{key}".lstrip("."), part, key
