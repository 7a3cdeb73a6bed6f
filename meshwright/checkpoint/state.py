"""What a checkpoint holds: every tensor under its parameter's name, so that it loads under any plan.

The keys are `model/<name>`, `optimizer/<parameter name>/<entry>`, and the names of a few small objects. A parameter
that a plan divides is written as chunks of the whole one, and one that several pipeline stages hold under its first
name in the untouched model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.pieces import held, pieces
from meshwright.errors import CheckpointError
from meshwright.parallel.shard import reshard
from meshwright.parallel.weights.layout import Layout, Tied, axis_apart, whole_shape

State = dict[str, Any]
Layouts = Mapping[str, Layout]
GROUPS = "optimizer_groups"


def model_state(module: nn.Module, layouts: Layouts | None = None) -> State:
    reshard(module)
    lying = layouts or {}
    return {f"model/{name}": pieces(value, lying.get(name)) for name, value in module.state_dict().items()}


def optimizer_state(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    layouts: Layouts | None = None,
    tied: Sequence[Tied] = (),
    mesh: DeviceMesh | None = None,
) -> State:
    """Collective where stages or branches lie apart: each rank knows the options of its own parameters."""
    reshard(module)
    names, lying = _names(module, tied), _by_name(layouts or {}, tied)
    state: State = {}
    for parameter, entries in optimizer.state.items():
        name = names[id(parameter)]
        for key, value in entries.items():
            if value is not None:
                state[f"optimizer/{name}/{key}"] = _entry(name, key, value, parameter, lying.get(name))
    groups = [
        {
            **{k: v for k, v in group.items() if k != "params"},
            "names": [names[id(p)] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    state[GROUPS] = _groups_of_all(groups, layouts or {}, mesh)
    return state


def optimizer_template(
    module: nn.Module, metadata: Metadata, layouts: Layouts | None = None, tied: Sequence[Tied] = ()
) -> State:
    """Empty tensors for the optimizer entries that a checkpoint holds of this model's parameters."""
    canonical, lying = _canonical(tied), _by_name(layouts or {}, tied)
    parameters = {canonical.get(name, name): parameter for name, parameter in module.named_parameters()}
    template: State = {}
    for key, about in metadata.state_dict_metadata.items():
        kind, _, rest = key.partition("/")
        name = rest.rpartition("/")[0]
        if kind != "optimizer" or name not in parameters:
            continue
        parameter, layout = parameters[name], lying.get(name)
        if not isinstance(about, TensorStorageMetadata):
            template[key] = None
        elif tuple(about.size) == whole_shape(parameter, layout):
            empty = torch.empty_like(parameter, dtype=about.properties.dtype, requires_grad=False)
            template[key] = pieces(empty, layout)
        else:
            template[key] = torch.empty(about.size, dtype=about.properties.dtype)
    return template


def restore_optimizer(
    module: nn.Module, optimizer: torch.optim.Optimizer, state: State, tied: Sequence[Tied] = ()
) -> None:
    """Puts loaded entries and options into an optimizer whose groups may be cut differently."""
    saved_options = {name: group for group in state[GROUPS] for name in group["names"]}
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
        saved = saved_options[group_names[0]] if group_names else group  # a stage may have none of a group
        options = {k: v for k, v in saved.items() if k not in ("names", "params")}
        groups.append({**options, "params": [numbers[name] for name in group_names]})
    entries: dict[int, dict[str, Any]] = {}
    for key, value in state.items():
        if key.startswith("optimizer/"):
            name, _, entry = key.removeprefix("optimizer/").rpartition("/")
            if name in numbers:
                entries.setdefault(numbers[name], {})[entry] = held(value)
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


def check_model(
    module: nn.Module, metadata: Metadata, layouts: Layouts | None = None, mesh: DeviceMesh | None = None
) -> None:
    """Names the first tensor in which the checkpoint and the model, all its stages and branches together, differ.
    Collective where they lie apart."""
    saved = {
        key.removeprefix("model/"): about
        for key, about in metadata.state_dict_metadata.items()
        if key.startswith("model/")
    }
    lying = layouts or {}
    mine = {
        name: whole_shape(value, lying.get(name)) if isinstance(value, Tensor) else None
        for name, value in module.state_dict().items()
    }
    shapes = {name: shape for stage in _of_all_ranks(mine, lying, mesh) for name, shape in stage.items()}
    for name, shape in shapes.items():
        if name not in saved:
            raise CheckpointError(f"the checkpoint has no {name}, which the model has: it is of another model")
        about = saved[name]
        if shape is not None and isinstance(about, TensorStorageMetadata) and tuple(about.size) != shape:
            raise CheckpointError(f"{name} is {tuple(about.size)} in the checkpoint, but {shape} in the model")
    extra = sorted(set(saved) - set(shapes))
    if extra:
        raise CheckpointError(f"the checkpoint holds {extra[0]}, which the model has not: it is of another model")


def _entry(name: str, key: str, value: Any, parameter: Tensor, layout: Layout | None) -> Any:
    if not isinstance(value, Tensor) or value.shape == parameter.shape:
        return pieces(value, layout)
    if value.dim() and (layout is not None or isinstance(parameter, DTensor)):
        raise CheckpointError(
            f"the optimizer's {key} of {name} is {tuple(value.shape)}, and the parameter is divided among ranks: only"
            f" entries of the parameter's own shape {tuple(parameter.shape)} and single numbers can be saved under this"
            " plan, use another optimizer or a plan that leaves parameters whole"
        )
    return value.full_tensor() if isinstance(value, DTensor) else value


def _groups_of_all(groups: list[dict[str, Any]], layouts: Layouts, mesh: DeviceMesh | None) -> list[dict[str, Any]]:
    """The groups with the names of all ranks: every one has the same groups, some of them empty."""
    stages = _of_all_ranks(groups, layouts, mesh)
    return [
        {**group, "names": list(dict.fromkeys(name for stage in stages for name in stage[place]["names"]))}
        for place, group in enumerate(groups)
    ]


def _of_all_ranks(mine: Any, layouts: Layouts, mesh: DeviceMesh | None) -> list[Any]:
    """What each rank of a pipeline, or of the tensor axis where branches lie apart, has to say."""
    axis = axis_apart(layouts, mesh)
    if axis is None or mesh is None:
        return [mine]
    group = mesh.get_group(axis)
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return found


def _canonical(tied: Sequence[Tied]) -> dict[str, str]:
    return {tie.local: tie.name for tie in tied}


def _by_name(layouts: Layouts, tied: Sequence[Tied]) -> dict[str, Layout]:
    canonical = _canonical(tied)
    return {**layouts, **{canonical[name]: layout for name, layout in layouts.items() if name in canonical}}


def _names(module: nn.Module, tied: Sequence[Tied] = ()) -> dict[int, str]:
    canonical = _canonical(tied)
    return {id(parameter): canonical.get(name, name) for name, parameter in module.named_parameters()}
