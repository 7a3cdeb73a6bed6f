"""Whole weights and gradients from a model that a plan has divided: the ordinary ones, for the untouched model.

All ranks call these together. Tensors are gathered one by one, so that beside the result one is in memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.shard import reshard
from meshwright.parallel.weights.layout import Layout, Lodged, Tied, axis_apart, gathered, whole_shape


def full_state(
    module: nn.Module,
    layouts: Mapping[str, Layout],
    mesh: DeviceMesh | None,
    *,
    order: Sequence[str] = (),
    everywhere: bool = True,
) -> dict[str, Any]:
    """The untouched model's `state_dict`, on the CPU, buffers and tied names included. `order`: its names, where they
    are known; otherwise a pipeline's stages come one after the other. Without `everywhere` only rank 0 keeps it."""
    reshard(module)
    return _full(dict(module.state_dict()), layouts, mesh, order, everywhere)


def full_gradients(
    module: nn.Module,
    layouts: Mapping[str, Layout],
    mesh: DeviceMesh | None,
    *,
    tied: Sequence[Tied] = (),
    order: Sequence[str] = (),
    everywhere: bool = True,
) -> dict[str, Tensor]:
    """The gradients under the names of the untouched model's `named_parameters`; those that are None are left out."""
    reshard(module)
    canonical = {tie.local: tie.name for tie in tied}
    found = {n: dense(p.grad) for n, p in module.named_parameters() if p.grad is not None}
    lying = {canonical.get(name, name): layout for name, layout in layouts.items()}
    return _full({canonical.get(name, name): value for name, value in found.items()}, lying, mesh, order, everywhere)


def dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


@dataclass(frozen=True)
class _Note:
    """What ranks of other stages or branches have to know of a tensor to receive it; without a shape it is another
    object."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None


def _full(
    held: Mapping[str, Any],
    layouts: Mapping[str, Layout],
    mesh: DeviceMesh | None,
    order: Sequence[str],
    everywhere: bool,
) -> dict[str, Any]:
    keep = everywhere or mesh is None or dist.get_rank() == 0
    result: dict[str, Any] = {}
    axis = axis_apart(layouts, mesh)
    if axis is None or mesh is None:
        for name, value in held.items():
            whole = _whole(value, layouts.get(name), mesh)
            if keep:
                result[name] = whole
        return _ordered(result, order)
    group = mesh.get_group(axis)
    notes: list[dict[str, _Note]] = [{} for _ in range(group.size())]
    mine = {name: _note(value, layouts.get(name)) for name, value in held.items()}
    dist.all_gather_object(notes, mine, group=group)
    for name in dict.fromkeys(name for stage in notes for name in stage):
        layout = layouts.get(name)
        if axis == "tensor" and not isinstance(layout, Lodged):  # beside the branches, all ranks hold the same names
            whole = _whole(held[name], layout, mesh)
        else:
            source = next(place for place, stage in enumerate(notes) if name in stage)
            own = _whole(held[name], layout, mesh) if group.rank() == source else None
            whole = _from_holder(own, notes[source][name], group, source, mesh.device_type)
        if keep:
            result[name] = whole
    return _ordered(result, order)


def _whole(value: Any, layout: Layout | None, mesh: DeviceMesh | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    with torch.no_grad():
        whole = gathered(value.detach(), layout, mesh)
        return whole.to("cpu", copy=True)


def _note(value: Any, layout: Layout | None) -> _Note:
    return _Note(whole_shape(value, layout), value.dtype) if isinstance(value, Tensor) else _Note(None, None)


def _from_holder(value: Any, note: _Note, group: dist.ProcessGroup, source: int, device_type: str) -> Any:
    if note.shape is None:
        box = [value]
        dist.broadcast_object_list(box, group=group, group_src=source)
        return box[0]
    there = torch.empty(note.shape, dtype=note.dtype) if value is None else value
    sent = there.to(device_type)  # NCCL sends from its own device only
    dist.broadcast(sent, group=group, group_src=source)
    return sent.cpu()


def _ordered(state: dict[str, Any], order: Iterable[str]) -> dict[str, Any]:
    known = {name: state[name] for name in order if name in state}
    return {**known, **{name: value for name, value in state.items() if name not in known}}
