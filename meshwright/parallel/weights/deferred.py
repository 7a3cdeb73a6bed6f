"""Initializes models that are larger than one rank's memory: built on the meta device, then filled shard by shard.

`build_on_meta` builds a model without memory and records every operator on its tensors. `materialize` replays those of
one parameter in real memory, under the seed derived from its name, keeps this rank's shard and frees the rest. The
weights are bitwise those of `initialize.initialize_model`. `find_unreproducible` names the tensors for which this is
impossible, with the reason. Of pretrained weights, a rank reads its shard only.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from meshwright.data.order import derive_seed
from meshwright.errors import InputError
from meshwright.parallel.torch_private import (
    OpOverload,
    TorchDispatchMode,
    operator_schema,
    storage_id,
    tree_leaves,
    tree_map,
)
from meshwright.parallel.weights.initialize import intercept_init_functions
from meshwright.parallel.weights.layout import ParameterLayout, ReadRegion, fill_local_shard, read_local_shard

_ALTERNATIVE = "build the whole model on every rank, under a plan that one rank's memory allows"


class CannotReproduce(Exception):
    """Says why a tensor's initial value cannot be computed by replaying the recorded operators."""


@dataclass(frozen=True)
class _RecordedCall:
    """One call of an operator, or of a function of torch.nn.init. `written` are the arguments that it changed in place,
    `new_tensors` its results in newly allocated memory, and `result_indices` their indices among all its results."""

    number: int
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: tuple[Tensor, ...]
    new_tensors: tuple[Tensor, ...]
    result_indices: tuple[int, ...]
    is_random: bool

    def fills(self, storage: int) -> bool:
        """Whether the call wrote every byte of this storage."""
        return any(storage_id(t) == storage and _covers_storage(t) for t in (*self.written, *self.new_tensors))


@dataclass(frozen=True)
class BuildRecording:
    """How the tensors of a model were computed while its code built it.

    - `calls`: by storage, the calls that wrote to it, in order.
    - `tensors`: by every name in the untouched model, the first name of the same tensor, and the tensor.
    - `skipped_fills`: by storage, a function of torch.nn.init that could not be intercepted and did nothing, because
      the tensor is on the meta device.
    """

    calls: Mapping[int, tuple[_RecordedCall, ...]]
    tensors: Mapping[str, tuple[str, Tensor]]
    skipped_fills: Mapping[int, str]


def build_on_meta(build: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, BuildRecording]:
    """The model on the meta device, and how its tensors were computed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        recorder, constants = _CallRecorder(), _ConstantsOnCpu()
        with recorder, torch.device("meta"), constants, intercept_init_functions(recorder.run_whole):
            try:
                model = build()
            except (NotImplementedError, RuntimeError) as error:
                raise InputError(
                    f"the model cannot be built without memory, since its code reads values ({error}): {_ALTERNATIVE}"
                ) from error
    calls = {storage: tuple(calls) for storage, calls in recorder.calls_by_storage.items()}
    return model, BuildRecording(calls, _tensors_by_name(model), constants.skipped_fills)


def find_unreproducible(
    module: nn.Module, recording: BuildRecording, pretrained: Collection[str] = ()
) -> dict[str, str]:
    """By name, the tensors whose initial values cannot be computed again, and why. Those named in `pretrained` do not
    need an initial value."""
    reasons: dict[str, str] = {}
    for name, (_, tensor) in recording.tensors.items():
        if name in pretrained:
            continue
        try:
            _calls_to_replay(tensor, recording)
        except CannotReproduce as error:
            reasons[name] = str(error)
    for name, submodule in module.named_modules():
        for key, value in vars(submodule).items():
            if isinstance(value, Tensor) and value.is_meta:
                reasons[f"{name}.{key}".lstrip(".")] = "it is a plain attribute: register it as a buffer"
    return reasons


def materialize(
    module: nn.Module,
    recording: BuildRecording,
    layouts: Mapping[str, ParameterLayout],
    seed: int,
    device: torch.device,
    pretrained: Mapping[str, ReadRegion] = MappingProxyType({}),
    shard_device: torch.device | None = None,
) -> None:
    """Gives every parameter and buffer of `module` real memory on `device` and its initial value. The plan may have
    cut and divided the module since it was built. `pretrained` has, by name in the untouched model, functions that
    read a part of a tensor that has a pretrained value. `shard_device` is the device of FSDP2's shards, if another."""
    unreproducible = find_unreproducible(module, recording, pretrained)
    if unreproducible:
        name, reason = next(iter(unreproducible.items()))
        more = f" (and {len(unreproducible) - 1} more)" if len(unreproducible) > 1 else ""
        raise InputError(f"{name}{more} cannot be initialized shard by shard: {reason}; or {_ALTERNATIVE}")
    # By id of the meta tensor, so that tied tensors stay tied. Meta tensors are kept alive, since ids are reused.
    real_tensors: dict[int, tuple[Tensor, Tensor]] = {}
    with torch.random.fork_rng(), torch.no_grad():
        for name, owner, key in _named_tensors_with_owner(module):
            table: dict[str, Any] = owner._parameters if key in owner._parameters else owner._buffers
            meta_tensor = table[key]
            if id(meta_tensor) not in real_tensors:
                first_name, whole = recording.tensors[name]
                place = shard_device or device if isinstance(meta_tensor, DTensor) else device
                real = torch.empty_like(meta_tensor, device=place, requires_grad=False)
                if name in pretrained:
                    read_local_shard(real, layouts.get(name), pretrained[name])
                else:
                    value = _initial_value(whole, recording, derive_seed(seed, "weights", first_name))
                    fill_local_shard(real, layouts.get(name), value)
                    del value
                if isinstance(meta_tensor, nn.Parameter):
                    real = nn.Parameter(real, meta_tensor.requires_grad)
                real_tensors[id(meta_tensor)] = (meta_tensor, real)
                real_tensors[id(real)] = (real, real)  # a module with two names is visited twice
            table[key] = real_tensors[id(meta_tensor)][1]


class _CallRecorder(TorchDispatchMode):
    """Records every operator that allocates a tensor or writes to one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls_by_storage: dict[int, list[_RecordedCall]] = {}
        self._number = 0
        self._is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._is_paused:
            return result
        inputs = {storage_id(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        new_tensors = [
            (index, leaf)
            for index, leaf in enumerate(tree_leaves(result))
            if isinstance(leaf, Tensor) and storage_id(leaf) not in inputs
        ]
        args, kwargs = _aliases((args, kwargs))
        written = tuple(_written_arguments(func, args, kwargs))
        if new_tensors or written:
            self._record(
                _RecordedCall(
                    self._number,
                    func,
                    args,
                    kwargs,
                    written,
                    new_tensors=tuple(tensor.detach() for _, tensor in new_tensors),
                    result_indices=tuple(index for index, _ in new_tensors),
                    is_random=torch.Tag.nondeterministic_seeded in func.tags,
                )
            )
        return result

    def run_whole(
        self, is_random: bool, function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Records a function of torch.nn.init as one call, and runs it where the tensor has real memory."""
        if not tensor.is_meta:
            self._is_paused = True
            try:
                function(tensor, *args, **kwargs)
            finally:
                self._is_paused = False
        alias = tensor.detach()
        self._record(_RecordedCall(self._number, function, (alias, *args), kwargs, (alias,), (), (), is_random))

    def _record(self, call: _RecordedCall) -> None:
        """Keeps the call and thereby its tensors alive: freed storages would be allocated again under the same id."""
        for storage in dict.fromkeys(storage_id(t) for t in (*call.new_tensors, *call.written)):
            self.calls_by_storage.setdefault(storage, []).append(call)
        self._number += 1


class _ConstantsOnCpu(TorchFunctionMode):
    """Creates tensors from numbers in the model's code on the CPU: on the meta device the numbers would be lost.

    It also notes in `skipped_fills` which functions of torch.nn.init found a meta tensor, which they leave as it is.
    Those that `intercept_init_functions` has caught never get here.
    """

    _READS_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]

    def __init__(self) -> None:
        super().__init__()
        self.skipped_fills: dict[int, str] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor):
            kwargs = {"device": "cpu", **kwargs}
        result = func(*args, **kwargs)
        if func == self._READS_IS_META and result:
            caller = sys._getframe(1).f_code
            if caller.co_filename == nn.init.__file__:
                self.skipped_fills[storage_id(args[0])] = caller.co_name
        return result


def _aliases(values: Any) -> Any:
    """The tensors with the memory that they have now: `module.double()` may give a parameter other memory later."""
    return tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, values)


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for index, argument in enumerate(operator_schema(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (t for t in tree_leaves(value) if isinstance(t, Tensor))


def _tensors_by_name(model: nn.Module) -> dict[str, tuple[str, Tensor]]:
    first_names: dict[int, str] = {}
    tensors: dict[str, tuple[str, Tensor]] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            tensors[name] = (first_names.setdefault(id(tensor), name), tensor)
    return tensors


def _calls_to_replay(tensor: Tensor, recording: BuildRecording, before: int | None = None) -> list[_RecordedCall]:
    """The recorded calls that compute a tensor's value: the last random call that filled the whole tensor and all calls
    after it, as in `initialize_model`, or all calls if no random call filled it. Empty for a tensor that was built in
    real memory and never written to. With `before`, only calls with a smaller number count: the value is then that
    which call number `before` reads. Raises `CannotReproduce` if the calls do not determine the value."""
    storage = storage_id(tensor)
    history = [call for call in recording.calls.get(storage, ()) if before is None or call.number < before]
    if not history and not tensor.is_meta:
        return []
    random_fills = [index for index, call in enumerate(history) if call.is_random and call.fills(storage)]
    calls = history[random_fills[-1] :] if random_fills else history
    if storage in recording.skipped_fills:
        raise CannotReproduce(
            f"torch.nn.init's {recording.skipped_fills[storage]} was not recorded: call it as torch.nn.init.…"
        )
    if before is not None and any(call.is_random for call in calls):
        raise CannotReproduce("it is computed from another random tensor: fill it in place (torch.nn.init)")
    if all(_only_allocates(call.function) for call in calls):
        raise CannotReproduce(
            "nothing fills it: give it a value" if calls else "its numbers come from outside: load them afterwards"
        )
    for call in calls:
        for argument in tree_leaves((call.args, call.kwargs)):
            if isinstance(argument, Tensor) and storage_id(argument) != storage and argument.is_meta:
                _calls_to_replay(argument, recording, call.number)
    return calls


def _initial_value(tensor: Tensor, recording: BuildRecording, seed: int | None, before: int | None = None) -> Tensor:
    """A tensor's value on the CPU, computed by replaying its calls under `seed`; a seed of None leaves the random
    generator as it is. `before` is the number of the call that reads the tensor, None for the value in the end."""
    calls = _calls_to_replay(tensor, recording, before)
    if not calls:
        return tensor
    storage = storage_id(tensor)
    memory = torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
    if not tensor.is_meta and not any(call.is_random for call in calls):
        return tensor  # it was built in real memory and without random numbers

    def real_argument(value: Any, number: int) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, Tensor):
            return value
        if storage_id(value) == storage:
            return _same_view(value, memory)
        return _initial_value(value, recording, None, number)

    if seed is not None:
        torch.manual_seed(seed)
    for call in calls:
        args, kwargs = tree_map(
            lambda value, number=call.number: real_argument(value, number), (call.args, call.kwargs)
        )
        results = tree_leaves(call.function(*args, **kwargs))
        for index, new_tensor in zip(call.result_indices, call.new_tensors, strict=True):
            if storage_id(new_tensor) == storage:
                _same_view(new_tensor, memory).copy_(results[index])
    return _same_view(tensor, memory)


def _same_view(tensor: Tensor, memory: torch.UntypedStorage) -> Tensor:
    """The view of `memory` with the offset, sizes and strides that a meta tensor has in its storage."""
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _covers_storage(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _only_allocates(function: Any) -> bool:
    return isinstance(function, OpOverload) and operator_schema(function).name.removeprefix("aten::") in (
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
    )


def _named_tensors_with_owner(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Every name of a parameter or buffer, the module that holds it, and its key there; tied ones under each name."""
    for prefix, submodule in module.named_modules(remove_duplicate=False):
        for key, tensor in [*submodule._parameters.items(), *submodule._buffers.items()]:
            if tensor is not None:
                yield f"{prefix}.{key}".lstrip("."), submodule, key
