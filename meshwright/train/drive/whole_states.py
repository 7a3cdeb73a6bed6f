"""Converts between the parts of tensors that a rank holds under a plan and the whole tensors in checkpoints of other
libraries, so that these are the same under every plan. `layouts` are those of split parameters, by the id of each."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.parallel.weights.layout import ParameterLayout, fill_local_shard, gather_parameter, whole_shape

Layouts = Mapping[int, ParameterLayout]


def whole_tensor(
    value: Any, like: Tensor | None = None, layout: ParameterLayout | None = None, mesh: DeviceMesh | None = None
) -> Any:
    """The whole of a shard, or of a tensor that is split as the parameter `like`, on the CPU; any other value as it is.
    All ranks call this together."""
    is_split = layout is not None and like is not None and isinstance(value, Tensor) and value.shape == like.shape
    if not isinstance(value, DTensor) and not is_split:
        return value
    with torch.no_grad():
        return gather_parameter(value.detach(), layout, mesh).to("cpu", copy=True)


def part_of_tensor(value: Any, like: Any, layout: ParameterLayout | None = None) -> Any:
    """The part of a whole tensor that `like`, a parameter of this rank, has; any other value as it is."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not isinstance(like, Tensor):
        return value
    if layout is None and not isinstance(like, DTensor):
        return value
    if tuple(value.shape) != tuple(whole_shape(like, layout)):
        return value  # an optimizer's entry of another shape, or a tensor that `load_state_dict` refuses
    part = torch.empty_like(like.detach(), dtype=value.dtype)
    with torch.no_grad():
        fill_local_shard(part, layout, value)
    return part


def whole_optimizer_state(
    optimizer: torch.optim.Optimizer,
    layouts: Layouts | None = None,
    mesh: DeviceMesh | None = None,
    *,
    keeps: bool = True,
) -> dict[str, Any]:
    """The optimizer's `state_dict` with whole tensors. All ranks call this together; those that do not need the result
    (`keeps` is False) get one without entries."""
    state = optimizer.state_dict()
    entries: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        if number in state["state"]:
            layout = (layouts or {}).get(id(parameter))
            entry = state["state"][number].items()
            whole = {name: whole_tensor(value, parameter, layout, mesh) for name, value in entry}
            if keeps:
                entries[number] = whole
    return {**state, "state": entries}


def divide_loaded_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], layouts: Layouts | None = None
) -> dict[str, Any]:
    """Returns a `state_dict` with whole tensors as `optimizer.load_state_dict` needs it, if a rank's parameters are
    parts."""
    entries = {
        number: {
            name: part_of_tensor(value, parameter, (layouts or {}).get(id(parameter)))
            for name, value in state["state"][number].items()
        }
        for number, parameter in enumerate(_parameters(optimizer))
        if number in state["state"]
    }
    return {**state, "state": entries}


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
