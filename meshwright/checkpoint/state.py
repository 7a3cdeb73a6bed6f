"""The contents of a checkpoint: every tensor under its parameter's name, so that the checkpoint loads under any plan.

The keys are `model/<name>`, `optimizer/<parameter name>/<entry>`, and the names of a few small objects. In an entry's
name, `/` is written as `%2F`. A parameter that a plan divides is written as chunks of the whole parameter. Optimizer
entries of a tied parameter that several pipeline stages hold are written under the parameter's first name in the user's
model.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.chunks import ChunkedTensor, as_chunked, local_value
from meshwright.checkpoint.frozen import FROZEN
from meshwright.checkpoint.index import SavedTensor
from meshwright.dtypes import torch_name
from meshwright.errors import CheckpointError, InputError
from meshwright.messages.exchange import all_gather_values
from meshwright.parallel.shard import reshard
from meshwright.parallel.weights.layout import ParameterLayout, TiedLayout, axis_with_different_names, whole_shape
from meshwright.parallel.weights.offload import host_copies, state_device

State = dict[str, Any]
Layouts = Mapping[str, ParameterLayout]
ModelDescription = dict[str, tuple[tuple[int, ...], str] | None]  # shapes and dtypes, see `describe_model`
GROUPS = "optimizer_groups"


def model_state(module: nn.Module, layouts: Layouts | None = None) -> State:
    """The model's state dict with keys `model/<name>`. Tensors that the plan divides are `ChunkedTensor` objects."""
    reshard(module)
    known_layouts = layouts or {}
    return {f"model/{name}": as_chunked(value, known_layouts.get(name)) for name, value in module.state_dict().items()}


def optimizer_state(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    layouts: Layouts | None = None,
    tied: Sequence[TiedLayout] = (),
    mesh: DeviceMesh | None = None,
) -> State:
    """The optimizer's entries with keys `optimizer/<parameter name>/<entry>`, and its groups with the parameter names
    of all ranks. If pipeline stages or branches of the model are on different ranks, these ranks must call this
    together, because each of them knows only its own parameters."""
    reshard(module)
    names = _names(module, tied)
    state: State = {}
    problem: InputError | None = None
    try:
        state = _optimizer_entries(optimizer, names, _layouts_by_first_name(layouts or {}, tied))
    except InputError as error:  # maybe on this rank only: all ranks raise it below
        problem = error
    groups = [
        {
            **{k: v for k, v in group.items() if k != "params"},
            "names": [names[id(p)] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    groups_and_problems = _gather_from_ranks([groups, problem and str(problem)], layouts or {}, mesh)
    for _, message in groups_and_problems:
        if message:
            raise problem or InputError(message)
    state[GROUPS] = _with_names_of_all_ranks(groups, [of_rank for of_rank, _ in groups_and_problems])
    return state


def entry_key(optimizer: torch.optim.Optimizer, name: str, entry: Any) -> str:
    """The key of an entry of a parameter's optimizer state. Raises an `InputError` if the entry's name is no text."""
    if not isinstance(entry, str):
        raise InputError(
            f"{type(optimizer).__name__} names an entry of its state {entry!r:.50}: checkpoints need texts as names"
        )
    return f"optimizer/{name}/{entry.replace('%', '%25').replace('/', '%2F')}"


def split_entry_key(key: str) -> tuple[str, str]:
    """The inverse of `entry_key`: the parameter's name and the entry's name."""
    name, _, entry = key.removeprefix("optimizer/").rpartition("/")
    return name, entry.replace("%2F", "/").replace("%25", "%")


def optimizer_template(
    module: nn.Module,
    tensors: Mapping[str, SavedTensor],
    objects: Mapping[str, Any],
    layouts: Layouts | None = None,
    tied: Sequence[TiedLayout] = (),
    optimizer: torch.optim.Optimizer | None = None,
) -> State:
    """Returns, by key, empty tensors to load optimizer entries into: one for each entry in the checkpoint that belongs
    to a parameter of this rank. They are where `optimizer` keeps its state (without one, where the parameters are).
    `tensors` and `objects` are those of the checkpoint. Entries that are not tensors are None."""
    first_names, layouts_by_name = _first_names(tied), _layouts_by_first_name(layouts or {}, tied)
    parameters = {first_names.get(name, name): parameter for name, parameter in module.named_parameters()}
    template: State = {}
    for key in (*tensors, *objects):
        name = split_entry_key(key)[0] if key.startswith("optimizer/") else None
        if name is None or name not in parameters:
            continue
        parameter, layout, saved = parameters[name], layouts_by_name.get(name), tensors.get(key)
        if saved is None:
            template[key] = None
        elif tuple(saved.shape) == whole_shape(parameter, layout):
            device = state_device(optimizer, parameter)
            empty = torch.empty_like(parameter, dtype=saved.torch_dtype, device=device, requires_grad=False)
            template[key] = as_chunked(empty, layout)
        else:
            template[key] = torch.empty(saved.shape, dtype=saved.torch_dtype)
    return template


def check_trained(
    module: nn.Module, optimizer: torch.optim.Optimizer, saved_groups: Any, tied: Sequence[TiedLayout] = ()
) -> None:
    """Raises a `CheckpointError` if this rank's optimizer has a parameter that the checkpoint's optimizer had not."""
    saved, names = {name for group in saved_groups for name in group["names"]}, _names(module, tied)
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if names[id(parameter)] not in saved:
            raise CheckpointError(
                f"the checkpoint's optimizer does not hold {names[id(parameter)]}: its job trained other parameters"
            )


def restore_optimizer(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: State,
    saved_groups: Any,
    tied: Sequence[TiedLayout] = (),
) -> None:
    """Puts loaded entries and group options into an optimizer. Its groups may differ from the saved ones, because they
    are matched by parameter name."""
    saved_options = {name: group for group in saved_groups for name in group["names"]}
    names = _names(module, tied)
    numbers: dict[str, int] = {}
    groups = []
    for group in optimizer.param_groups:
        group_names = [names[id(p)] for p in group["params"]]
        for name in group_names:
            numbers[name] = len(numbers)
        # A pipeline stage may hold no parameter of a group. Then the group keeps its current options.
        saved = saved_options[group_names[0]] if group_names else group
        options = {k: v for k, v in saved.items() if k not in ("names", "params")}
        groups.append({**options, "params": [numbers[name] for name in group_names]})
    entries: dict[int, dict[str, Any]] = {}
    for key, value in state.items():
        if key.startswith("optimizer/"):
            name, entry = split_entry_key(key)
            if name in numbers:
                entries.setdefault(numbers[name], {})[entry] = local_value(value)
    copies = host_copies(optimizer)  # torch moves loaded state to the device of the parameter
    with copies.on_host() if copies else nullcontext():
        optimizer.load_state_dict({"state": entries, "param_groups": groups})


def check_model(
    module: nn.Module,
    tensors: Mapping[str, SavedTensor],
    objects: Mapping[str, Any],
    layouts: Layouts | None = None,
    mesh: DeviceMesh | None = None,
) -> None:
    """Raises a `CheckpointError` that names the first tensor in which the checkpoint and the whole model differ.
    `tensors` and `objects` are those of the checkpoint. If pipeline stages or branches of the model are on different
    ranks, these ranks must call this together."""
    local = describe_model(model_state(module, layouts))
    model = {name: kind for of_rank in _gather_from_ranks(local, layouts or {}, mesh) for name, kind in of_rank.items()}
    difference = find_difference(model, tensors, objects)
    if difference is not None:
        raise CheckpointError(difference)
    saved = [key.removeprefix("model/") for key in (*tensors, *objects) if key.startswith("model/")]
    extra = sorted(name for name in (*saved, *objects.get(FROZEN, {})) if name not in model)
    if extra:
        raise CheckpointError(f"the checkpoint holds {extra[0]}, which the model has not: it is of another model")


def describe_model(state: State) -> ModelDescription:
    """Returns the shape of each whole tensor of the model and torch's name of its dtype, by the tensor's name. Extra
    state that is no tensor is None."""
    return {
        key.removeprefix("model/"): (
            (tuple(value.shape), torch_name(local_value(value).dtype))
            if isinstance(value, ChunkedTensor | Tensor)
            else None
        )
        for key, value in state.items()
        if key.startswith("model/")
    }


def find_difference(
    model: ModelDescription, tensors: Mapping[str, SavedTensor], objects: Mapping[str, Any]
) -> str | None:
    """Returns a sentence about the first tensor of the model that the checkpoint does not have, or has with another
    shape or kind of numbers. None if it has all of them. `tensors` and `objects` are those of the checkpoint."""
    frozen = objects.get(FROZEN, {})
    for name, kind in model.items():
        key = f"model/{name}"
        saved = tensors.get(key)
        if name in frozen:  # it was left out
            dtype, shape, _ = frozen[name]
            if kind != (tuple(shape), dtype):
                in_model = f"{kind[1]} of {kind[0]}" if kind else "no tensor"
                return f"{name} was a frozen {dtype} of {tuple(shape)} at the save, but is {in_model} in the model"
            continue
        if saved is None and key not in objects:
            return f"the checkpoint has no {name}, which the model has: it is of another model"
        if saved is None or kind is None:
            if saved is not None or kind is not None:
                return f"{name} is {'no' if saved is None else 'a'} tensor in the checkpoint, but not in the model"
            continue
        shape, dtype = kind
        if tuple(saved.shape) != tuple(shape):
            return f"{name} is {tuple(saved.shape)} in the checkpoint, but {tuple(shape)} in the model"
        if not saved.converts_to(dtype):
            return f"{name} is {saved.dtype} in the checkpoint, but {dtype} in the model"
    return None


def _optimizer_entries(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], layouts: Mapping[str, ParameterLayout]
) -> State:
    """Returns the optimizer's entries by key. Raises an `InputError` for one that cannot be saved."""
    state: State = {}
    for parameter, entries in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None:
            raise InputError(
                f"{type(optimizer).__name__} has state under a {type(parameter).__name__} that is no parameter of the"
                " model: only the state of parameters can be saved"
            )
        layout = layouts.get(name)
        axis = layout.axis if layout else "shard" if isinstance(parameter, DTensor) else None
        for key, value in entries.items():
            if axis is not None and not _can_be_divided(value, parameter):
                kind = f"{tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__} of tensors"
                shape = whole_shape(parameter, layout)
                raise InputError(
                    f"{type(optimizer).__name__}: its {key} of {name} is {kind}, but the plan's axis {axis} divides"
                    f" this parameter among ranks, so that only tensors of its own shape {shape} and single numbers"
                    " can be saved: use another optimizer, or a plan that leaves parameters whole"
                )
            if value is not None:
                state[entry_key(optimizer, name, key)] = _entry(value, parameter, layout)
    return state


def _can_be_divided(value: Any, parameter: Tensor) -> bool:
    """Whether an entry of the state of a parameter that is divided among ranks can be saved: a tensor of the
    parameter's shape, which is divided in the same way, or a value that is the same on all ranks."""
    if isinstance(value, Tensor):
        return value.dim() == 0 or value.shape == parameter.shape
    return not _holds_arrays(value)


def _holds_arrays(value: Any) -> bool:
    """Whether a value is a tensor or an array with dimensions, or a container of such. Each rank has its own."""
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0
    items = value.values() if isinstance(value, Mapping) else value
    is_container = isinstance(value, Mapping | list | tuple | set | frozenset | deque)
    return is_container and any(map(_holds_arrays, items))


def _entry(value: Any, parameter: Tensor, layout: ParameterLayout | None) -> Any:
    """Returns one entry of a parameter's optimizer state in the form in which it is saved."""
    if not isinstance(value, Tensor) or value.shape == parameter.shape:
        return as_chunked(value, layout)
    return value.full_tensor() if isinstance(value, DTensor) else value


def _with_names_of_all_ranks(
    groups: list[dict[str, Any]], groups_of_ranks: Sequence[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Returns the groups with the parameter names of all ranks. Every rank has the same groups, but may hold no
    parameter of some."""
    combined = []
    for number, group in enumerate(groups):
        names = dict.fromkeys(name for of_rank in groups_of_ranks for name in of_rank[number]["names"])
        combined.append({**group, "names": list(names)})
    return combined


def _gather_from_ranks(value: Any, layouts: Layouts, mesh: DeviceMesh | None) -> list[Any]:
    """Returns the values of all ranks of the axis whose ranks have different parameters: the pipeline axis, or the
    tensor axis if branches of the model are on different ranks, or the servers. If there is no such axis, returns only
    this rank's value."""
    axis = axis_with_different_names(layouts, mesh)
    if axis is None or mesh is None:
        return [value]
    return all_gather_values(value, mesh.get_group(axis))


def _first_names(tied: Sequence[TiedLayout]) -> dict[str, str]:
    return {tie.local_name: tie.name for tie in tied}


def _layouts_by_first_name(layouts: Layouts, tied: Sequence[TiedLayout]) -> dict[str, ParameterLayout]:
    first_names = _first_names(tied)
    return {**layouts, **{first_names[name]: layout for name, layout in layouts.items() if name in first_names}}


def _names(module: nn.Module, tied: Sequence[TiedLayout] = ()) -> dict[int, str]:
    first_names = _first_names(tied)
    return {id(parameter): first_names.get(name, name) for name, parameter in module.named_parameters()}
