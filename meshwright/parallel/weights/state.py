"""Gathers the weights and gradients of a model that a plan has divided, under the names and in the shapes of the
untouched model.

All ranks call these functions together. Tensors are gathered one by one, so that besides the result only one whole
tensor is in memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import InputError
from meshwright.messages.exchange import all_gather_values, broadcast_value
from meshwright.messages.plain_values import NotPlainError, to_text
from meshwright.parallel.shard import reshard
from meshwright.parallel.weights.layout import (
    ParameterLayout,
    TiedLayout,
    WholeOnOneRank,
    axis_with_different_names,
    gather_parameter,
    whole_shape,
)


def full_state(
    module: nn.Module,
    layouts: Mapping[str, ParameterLayout],
    mesh: DeviceMesh | None,
    *,
    order: Sequence[str] = (),
    everywhere: bool = True,
) -> dict[str, Any]:
    """The untouched model's `state_dict` on the CPU, with buffers and all names of tied parameters. `order` lists its
    names; names that are not in it follow, in the order of the ranks that hold them. With `everywhere` all ranks return
    the state, otherwise only rank 0 does and the other ranks return an empty dict. All ranks raise InputError if a
    module's extra state has to be sent to other ranks and is not plain (plain_values.py)."""
    reshard(module)
    return _gather_all(dict(module.state_dict()), layouts, mesh, order, everywhere)


def full_gradients(
    module: nn.Module,
    layouts: Mapping[str, ParameterLayout],
    mesh: DeviceMesh | None,
    *,
    tied: Sequence[TiedLayout] = (),
    order: Sequence[str] = (),
    everywhere: bool = True,
) -> dict[str, Tensor]:
    """The full gradients on the CPU, by the names of the untouched model's `named_parameters`, without those that are
    None. `order` and `everywhere` are those of `full_state`."""
    reshard(module)
    first_names = {tie.local_name: tie.name for tie in tied}
    gradients = {
        first_names.get(name, name): dense(parameter.grad)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    layouts_by_first_name = {first_names.get(name, name): layout for name, layout in layouts.items()}
    return _gather_all(gradients, layouts_by_first_name, mesh, order, everywhere)


def dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


@dataclass(frozen=True)
class _Description:
    """What ranks of other stages or branches have to know of a value to receive it. `shape` and `dtype` are None for a
    value that is not a tensor. `problem` says why such a value cannot be sent; it is None if it can."""

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    problem: str | None = None


def _gather_all(
    local: Mapping[str, Any],
    layouts: Mapping[str, ParameterLayout],
    mesh: DeviceMesh | None,
    order: Sequence[str],
    everywhere: bool,
) -> dict[str, Any]:
    returns_state = everywhere or mesh is None or dist.get_rank() == 0
    result: dict[str, Any] = {}
    axis = axis_with_different_names(layouts, mesh)
    if axis is None or mesh is None:
        for name, value in local.items():
            whole = _gather(value, layouts.get(name), mesh)
            if returns_state:
                result[name] = whole
        return _ordered(result, order)
    group = mesh.get_group(axis)
    local_descriptions = {name: _describe(name, value, layouts.get(name)) for name, value in local.items()}
    descriptions = _gather_descriptions(local_descriptions, group)
    for name in dict.fromkeys(name for of_rank in descriptions for name in of_rank):
        layout = layouts.get(name)
        if axis != "pipeline" and not isinstance(layout, WholeOnOneRank):  # outside of branches all ranks have it
            whole = _gather(local[name], layout, mesh)
        else:
            source = next(rank for rank, of_rank in enumerate(descriptions) if name in of_rank)
            value = _gather(local[name], layout, mesh) if group.rank() == source else None
            whole = _broadcast(value, descriptions[source][name], group, source, mesh.device_type)
        if returns_state:
            result[name] = whole
    return _ordered(result, order)


def _gather(value: Any, layout: ParameterLayout | None, mesh: DeviceMesh | None) -> Any:
    """A whole tensor on the CPU; objects that are not tensors as they are."""
    if not isinstance(value, Tensor):
        return value
    with torch.no_grad():
        whole = gather_parameter(value.detach(), layout, mesh)
        return whole.to("cpu", copy=True)


def _describe(name: str, value: Any, layout: ParameterLayout | None) -> _Description:
    if isinstance(value, Tensor):
        return _Description(whole_shape(value, layout), value.dtype)
    try:
        to_text(value, name)
    except NotPlainError as error:
        return _Description(problem=str(error))
    return _Description()


def _gather_descriptions(local: Mapping[str, _Description], group: dist.ProcessGroup) -> list[dict[str, _Description]]:
    """The descriptions of all ranks of the group, by name."""
    of_ranks = all_gather_values({name: asdict(description) for name, description in local.items()}, group)
    return [{name: _Description(**fields) for name, fields in of_rank.items()} for of_rank in of_ranks]


def _broadcast(value: Any, description: _Description, group: dist.ProcessGroup, source: int, device_type: str) -> Any:
    """The value of the group's rank `source`; on the other ranks `value` is None."""
    if description.problem:
        raise InputError(
            f"{description.problem}, which cannot be sent to other ranks: let get_extra_state return numbers, texts,"
            " tensors, and lists, tuples, sets and dicts of these"
        )
    if description.shape is None:
        return broadcast_value(value, group, source)
    tensor = torch.empty(description.shape, dtype=description.dtype) if value is None else value
    # NCCL sends and receives on GPUs only. Memory is sent as it is, and the receivers' tensors are contiguous.
    on_device = tensor.to(device_type).contiguous()
    dist.broadcast(on_device, group=group, group_src=source)
    return on_device.cpu()


def _ordered(state: dict[str, Any], order: Iterable[str]) -> dict[str, Any]:
    """The state with the names of `order` first, in that order."""
    first = {name: state[name] for name in order if name in state}
    return {**first, **{name: value for name, value in state.items() if name not in first}}
