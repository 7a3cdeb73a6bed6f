"""`ParameterLayout`: where a rank's shard lies in the whole parameter, so that no plan changes names and shapes.

A dimension of size n may consist of parts n1 + n2 + … (a fused layer) that are divided each by itself; otherwise it is
one part. Rank r of t holds

    of each part nk the rows  [r · c, min((r + 1) · c, nk)),  c = ceil(nk / t)          shard_ranges()
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.parallel.differentiable_collectives import AxisGroup, ShardRanges, all_gather_tensor, consecutive_ranges
from meshwright.parallel.weights.proportional_shards import row_division

# Returns a part of a whole tensor. The arguments are the offsets at which it begins, and its size in each dimension.
ReadRegion = Callable[[tuple[int, ...], tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class ParameterLayout:
    """What a rank holds of a parameter whose whole shape is `shape`: the `ranges` (first row, number of rows) of
    dimension `dim`, concatenated. The other ranks of the mesh's `axis` hold the rest. `part_sizes` are the sizes of the
    parts of the dimension that are divided each by itself."""

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]
    axis: str
    part_sizes: tuple[int, ...]


@dataclass(frozen=True)
class WholeOnOneRank(ParameterLayout):
    """One rank of the axis holds the whole parameter and the others nothing, but all of them know its name and
    shape."""


def whole_on_one_rank(value: Any, axis: str) -> WholeOnOneRank:
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    return WholeOnOneRank(shape, 0, ((0, shape[0]),) if shape else (), axis, shape[:1])


def axis_with_different_names(layouts: Mapping[str, ParameterLayout], mesh: DeviceMesh | None) -> str | None:
    """The axis whose ranks hold tensors of different names: the pipeline axis, the tensor axis where branches are on
    different ranks, or the expert axis where experts are modules of a list. None where all ranks have the same
    names."""
    if mesh is not None and "pipeline" in (mesh.mesh_dim_names or ()):
        return "pipeline"
    return next((layout.axis for layout in layouts.values() if isinstance(layout, WholeOnOneRank)), None)


def shard_layout(
    shape: Sequence[int], dim: int, part_sizes: Sequence[int], axis: str, ranks: int, rank: int
) -> ParameterLayout:
    """The layout of rank `rank`. Empty `part_sizes` mean that the whole dimension is one part."""
    sizes = tuple(part_sizes) or (shape[dim],)
    return ParameterLayout(tuple(shape), dim, shard_ranges(sizes, ranks, rank), axis, sizes)


def shard_ranges(part_sizes: Sequence[int], ranks: int, rank: int) -> tuple[tuple[int, int], ...]:
    """The first row and the number of rows that a rank holds of each part."""
    ranges, begin = [], 0
    for size in part_sizes:
        chunk = -(-size // ranks)
        first = min(rank * chunk, size)
        ranges.append((begin + first, min(chunk, size - first)))
        begin += size
    return tuple(ranges)


def local_shard(whole: Tensor, layout: ParameterLayout) -> Tensor:
    """A copy of this rank's shard of a whole tensor."""
    pieces = [whole.narrow(layout.dim, first, rows) for first, rows in layout.ranges]
    return torch.cat(pieces, layout.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)


def gather_shards(shard: Tensor, layout: ParameterLayout, group: dist.ProcessGroup) -> Tensor:
    """The whole parameter from the shards of all ranks of the axis, which all call this together."""
    ranks = group.size()
    ranges = tuple(shard_ranges(layout.part_sizes, ranks, rank) for rank in range(ranks))
    division = ShardRanges(layout.dim, layout.shape[layout.dim], ranges)
    return all_gather_tensor(shard, division, AxisGroup(group, group.rank(), ranks, layout.axis))


# ---- FSDP2 divides the rows of a shard once more


class TiedLayout(Protocol):
    """A parameter that several pipeline ranks hold: its name in the untouched model's `named_parameters`, its name in
    this rank's module, and the pipeline coordinates that hold it."""

    @property
    def name(self) -> str: ...
    @property
    def local_name(self) -> str: ...
    @property
    def holders(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class ShardRegion:
    """A rectangular region of a tensor: `sizes` per dimension, beginning at `offsets` in the whole tensor and at
    `local_offsets` in the memory of this rank."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that FSDP2 may have divided."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_shape(tensor: Tensor, layout: ParameterLayout | None) -> tuple[int, ...]:
    return layout.shape if layout else tuple(tensor.shape)


def shard_regions(tensor: Tensor, layout: ParameterLayout | None) -> tuple[ShardRegion, ...]:
    """The regions that this rank holds of a parameter, or of a tensor of the same shape such as its optimizer state.
    Regions without elements are left out."""
    if tensor.dim() == 0:
        return (ShardRegion((), (), ()),)
    shape, begin = tuple(tensor.shape), 0
    local_sizes, starts = list(shape), [0] * len(shape)
    if isinstance(tensor, DTensor) and (division := row_division(tensor)):
        local_sizes[division.dim], starts[division.dim] = division.rows[division.rank], division.first
    regions: list[ShardRegion] = []
    dim, ranges = (layout.dim, layout.ranges) if layout else (0, ((0, shape[0]),))
    for first_of_range, length in ranges:  # the range is [begin, begin + length) of the shard along `dim`
        offsets, sizes, local_offsets = list(starts), list(local_sizes), [0] * len(shape)
        low, high = max(begin, starts[dim]), min(begin + length, starts[dim] + local_sizes[dim])
        offsets[dim], sizes[dim] = first_of_range + low - begin, max(0, high - low)
        local_offsets[dim] = low - starts[dim]
        regions.append(ShardRegion(tuple(offsets), tuple(sizes), tuple(local_offsets)))
        begin += length
    return tuple(region for region in regions if all(region.sizes))


def region_view(local: Tensor, region: ShardRegion) -> Tensor:
    """A view of the region in the memory of this rank."""
    return _narrow(local, region.local_offsets, region.sizes)


def fill_local_shard(tensor: Tensor, layout: ParameterLayout | None, whole: Tensor) -> None:
    """Copies this rank's shard of `whole` into `tensor`."""
    local = local_tensor(tensor)
    for region in shard_regions(tensor, layout):
        region_view(local, region).copy_(_narrow(whole, region.offsets, region.sizes))


def read_local_shard(tensor: Tensor, layout: ParameterLayout | None, read: ReadRegion) -> None:
    """Copies this rank's shard into `tensor`. `read` is called for the regions of this rank only."""
    local = local_tensor(tensor)
    for region in shard_regions(tensor, layout):
        region_view(local, region).copy_(read(region.offsets, region.sizes))


def gather_parameter(tensor: Tensor, layout: ParameterLayout | None, mesh: DeviceMesh | None) -> Tensor:
    """The whole parameter, gradient or buffer; every rank that holds a shard of it calls this."""
    shard = _gather_rows(tensor) if isinstance(tensor, DTensor) else tensor
    if layout is None or isinstance(layout, WholeOnOneRank):
        return shard
    assert mesh is not None
    return gather_shards(shard, layout, mesh.get_group(layout.axis))


def _narrow(tensor: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _gather_rows(tensor: DTensor) -> Tensor:
    """The whole tensor, gathered from FSDP2's shards. `DTensor.full_tensor` is not used, because it crashes the process
    if CUDA tensors are sent over Gloo."""
    division = row_division(tensor)
    assert division is not None
    group = tensor.device_mesh.get_group(division.axis)
    axis_group = AxisGroup(group, group.rank(), group.size(), "shard")
    return all_gather_tensor(tensor.to_local(), consecutive_ranges(division.dim, division.rows), axis_group)
