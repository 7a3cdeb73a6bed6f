"""The contents of a checkpoint: every tensor under its parameter's name, so that the checkpoint loads under any plan.

The keys are `model/<name>`, `optimizer/<parameter name>/<entry>`, and the names of a few small objects. A parameter
that a plan divides is written as chunks of the whole parameter. Optimizer entries of a tied parameter that several
pipeline stages hold are written under the parameter's first name in the user's model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.chunks import as_chunked, local_value
from meshwright.checkpoint.index import SavedTensor
from meshwright.errors import CheckpointError
from meshwright.exchange import all_gather_values
from meshwright.parallel.shard import reshard
from meshwright.parallel.weights.layout import ParameterLayout, TiedLayout, axis_with_different_names, whole_shape

State = dict[str, Any]
Layouts = Mapping[str, ParameterLayout]
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
    names, layouts_by_name = _names(module, tied), _layouts_by_first_name(layouts or {}, tied)
    state: State = {}
    for parameter, entries in optimizer.state.items():
        name = names[id(parameter)]
        for key, value in entries.items():
            if value is not None:
                state[f"optimizer/{name}/{key}"] = _entry(name, key, value, parameter, layouts_by_name.get(name))
    groups = [
        {
            **{k: v for k, v in group.items() if k != "params"},
            "names": [names[id(p)] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    state[GROUPS] = _groups_of_all_ranks(groups, layouts or {}, mesh)
    return state


def optimizer_template(
    module: nn.Module,
    tensors: Mapping[str, SavedTensor],
    objects: Mapping[str, Any],
    layouts: Layouts | None = None,
    tied: Sequence[TiedLayout] = (),
) -> State:
    """Returns, by key, empty tensors to load optimizer entries into: one for each entry in the checkpoint that belongs
    to a parameter of this rank. `tensors` and `objects` are those of the checkpoint. Entries that are not tensors are
    None."""
    first_names, layouts_by_name = _first_names(tied), _layouts_by_first_name(layouts or {}, tied)
    parameters = {first_names.get(name, name): parameter for name, parameter in module.named_parameters()}
    template: State = {}
    for key in (*tensors, *objects):
        kind, _, rest = key.partition("/")
        name = rest.rpartition("/")[0]
        if kind != "optimizer" or name not in parameters:
            continue
        parameter, layout, saved = parameters[name], layouts_by_name.get(name), tensors.get(key)
        if saved is None:
            template[key] = None
        elif tuple(saved.shape) == whole_shape(parameter, layout):
            empty = torch.empty_like(parameter, dtype=saved.torch_dtype, requires_grad=False)
            template[key] = as_chunked(empty, layout)
        else:
            template[key] = torch.empty(saved.shape, dtype=saved.torch_dtype)
    return template


def restore_optimizer(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: State,
    saved_groups: Any,
    tied: Sequence[TiedLayout] = (),
) -> None:
    """Puts loaded entries and group options into an optimizer. Its groups may differ from the saved ones, because they
    are matched by parameter name."""
    try:
        saved_options = {name: group for group in saved_groups for name in group["names"]}
    except (TypeError, KeyError):
        raise CheckpointError("the checkpoint's optimizer groups are damaged") from None
    names = _names(module, tied)
    numbers: dict[str, int] = {}
    groups = []
    for group in optimizer.param_groups:
        group_names = [names[id(p)] for p in group["params"]]
        missing = [name for name in group_names if name not in saved_options]
        if missing:
            raise CheckpointError(
                f"the checkpoint's optimizer does not hold {missing[0]}: its job trained other parameters"
            )
        for name in group_names:
            numbers[name] = len(numbers)
        # A pipeline stage may hold no parameter of a group. Then the group keeps its current options.
        saved = saved_options[group_names[0]] if group_names else group
        options = {k: v for k, v in saved.items() if k not in ("names", "params")}
        groups.append({**options, "params": [numbers[name] for name in group_names]})
    entries: dict[int, dict[str, Any]] = {}
    for key, value in state.items():
        if key.startswith("optimizer/"):
            name, _, entry = key.removeprefix("optimizer/").rpartition("/")
            if name in numbers:
                entries.setdefault(numbers[name], {})[entry] = local_value(value)
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
    keys = [key for key in (*tensors, *objects) if key.startswith("model/")]
    saved = {key.removeprefix("model/"): tensors.get(key) for key in keys}
    known_layouts = layouts or {}
    local_shapes = {
        name: whole_shape(value, known_layouts.get(name)) if isinstance(value, Tensor) else None
        for name, value in module.state_dict().items()
    }
    shapes_of_ranks = _gather_from_ranks(local_shapes, known_layouts, mesh)
    shapes = {name: shape for of_rank in shapes_of_ranks for name, shape in of_rank.items()}
    for name, shape in shapes.items():
        if name not in saved:
            raise CheckpointError(f"the checkpoint has no {name}, which the model has: it is of another model")
        entry = saved[name]
        if (shape is None) != (entry is None):
            kind = "no tensor" if entry is None else "a tensor"
            raise CheckpointError(f"{name} is {kind} in the checkpoint, but not in the model")
        if entry is not None and tuple(entry.shape) != shape:
            raise CheckpointError(f"{name} is {tuple(entry.shape)} in the checkpoint, but {shape} in the model")
    extra = sorted(set(saved) - set(shapes))
    if extra:
        raise CheckpointError(f"the checkpoint holds {extra[0]}, which the model has not: it is of another model")


def _entry(name: str, key: str, value: Any, parameter: Tensor, layout: ParameterLayout | None) -> Any:
    """Returns one entry of a parameter's optimizer state in the form in which it is saved."""
    if not isinstance(value, Tensor) or value.shape == parameter.shape:
        return as_chunked(value, layout)
    if value.dim() and (layout is not None or isinstance(parameter, DTensor)):
        raise CheckpointError(
            f"the optimizer's {key} of {name} is {tuple(value.shape)}, and the parameter is divided among ranks: only"
            f" entries of the parameter's own shape {tuple(parameter.shape)} and single numbers can be saved under this"
            " plan, use another optimizer or a plan that leaves parameters whole"
        )
    return value.full_tensor() if isinstance(value, DTensor) else value


def _groups_of_all_ranks(
    groups: list[dict[str, Any]], layouts: Layouts, mesh: DeviceMesh | None
) -> list[dict[str, Any]]:
    """Returns the groups with the parameter names of all ranks. Every rank has the same groups, but may hold no
    parameter of some."""
    groups_of_ranks = _gather_from_ranks(groups, layouts, mesh)
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
