"""`Layout`: where a rank's part of a divided parameter lies in the whole, so that its name and shape outlive a plan.

Along one dimension of size n, made of parts n1 + n2 + … (a fused layer; otherwise one part), rank r of t holds

    of each part nk the rows  [r · c, min((r + 1) · c, nk)),  c = ceil(nk / t)          stretches()
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright.parallel.exchange import Division, Team, all_gather, even


@dataclass(frozen=True)
class Layout:
    """Of a parameter of `shape`, this rank holds the `stretches` (first row, rows) of dimension `dim`, one behind the
    other; the other parts lie on the other ranks of the mesh's `axis`."""

    shape: tuple[int, ...]
    dim: int
    stretches: tuple[tuple[int, int], ...]
    axis: str
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Lodged(Layout):
    """It lies whole on one rank of the axis, and not at all on the others: all of them know its name and its shape."""


def lodge(value: Any, axis: str) -> Lodged:
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    return Lodged(shape, 0, ((0, shape[0]),) if shape else (), axis, shape[:1])


def axis_apart(layouts: Mapping[str, Layout], mesh: DeviceMesh | None) -> str | None:
    """The axis whose ranks hold tensors of different names: a pipeline's stages, or branches along the tensor axis."""
    if mesh is not None and "pipeline" in (mesh.mesh_dim_names or ()):
        return "pipeline"
    return next((layout.axis for layout in layouts.values() if isinstance(layout, Lodged)), None)


def lay_out(shape: Sequence[int], dim: int, parts: Sequence[int], axis: str, ranks: int, rank: int) -> Layout:
    """`parts` are the sizes that are divided each by itself; none stands for the whole dimension."""
    sizes = tuple(parts) or (shape[dim],)
    return Layout(tuple(shape), dim, stretches(sizes, ranks, rank), axis, sizes)


def stretches(parts: Sequence[int], ranks: int, rank: int) -> tuple[tuple[int, int], ...]:
    found, begin = [], 0
    for size in parts:
        chunk = -(-size // ranks)
        first = min(rank * chunk, size)
        found.append((begin + first, min(chunk, size - first)))
        begin += size
    return tuple(found)


def part_of(whole: Tensor, layout: Layout) -> Tensor:
    """This rank's part, as a tensor of its own."""
    pieces = [whole.narrow(layout.dim, first, rows) for first, rows in layout.stretches]
    return torch.cat(pieces, layout.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)


def whole_of(part: Tensor, layout: Layout, group: dist.ProcessGroup) -> Tensor:
    """The whole parameter, from the parts of all ranks of the axis; all of them call it."""
    ranks = group.size()
    places = tuple(stretches(layout.parts, ranks, rank) for rank in range(ranks))
    division = Division(layout.dim, layout.shape[layout.dim], places)
    return all_gather(part, division, Team(group, group.rank(), ranks, layout.axis))


# ---- FSDP2 divides the rows of a part once more


class Tied(Protocol):
    """A parameter that several pipeline ranks hold: its name in the untouched model's `named_parameters`, the name
    it has here, and the pipeline coordinates that hold it."""

    @property
    def name(self) -> str: ...
    @property
    def local(self) -> str: ...
    @property
    def holders(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Rectangle:
    """`sizes` numbers of a tensor that begin at `offsets` of the whole, and at `begin` of what this rank holds."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: tuple[int, ...]


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that FSDP2 may have divided."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_shape(tensor: Tensor, layout: Layout | None) -> tuple[int, ...]:
    return layout.shape if layout else tuple(tensor.shape)


def rows_of(tensor: Tensor) -> tuple[int, int]:
    """The first row and the number of rows that this rank holds of a tensor that FSDP2 may have divided."""
    if isinstance(tensor, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return (offsets[0], sizes[0]) if tensor.dim() else (0, 1)
    return (0, tensor.shape[0]) if tensor.dim() else (0, 1)


def rectangles(tensor: Tensor, layout: Layout | None) -> tuple[Rectangle, ...]:
    """What this rank holds of a parameter or of a tensor that goes with it, as rectangles of the whole."""
    if tensor.dim() == 0:
        return (Rectangle((), (), ()),)
    first, rows = rows_of(tensor)
    shape, begin = tuple(tensor.shape), 0
    found: list[Rectangle] = []
    dim, lengths = (layout.dim, layout.stretches) if layout else (0, ((0, shape[0]),))
    for place, length in lengths:  # which lie at begin … begin + length of the part
        offsets, sizes, starts = [first, *[0] * (len(shape) - 1)], [rows, *shape[1:]], [0] * len(shape)
        low, high = (max(begin, first), min(begin + length, first + rows)) if dim == 0 else (begin, begin + length)
        offsets[dim], sizes[dim] = place + low - begin, max(0, high - low)
        starts[dim] = low - first if dim == 0 else low
        found.append(Rectangle(tuple(offsets), tuple(sizes), tuple(starts)))
        begin += length
    return tuple(rectangle for rectangle in found if all(rectangle.sizes))


def view_of(local: Tensor, rectangle: Rectangle) -> Tensor:
    """The rectangle's numbers in what this rank holds."""
    for dim, (begin, size) in enumerate(zip(rectangle.begin, rectangle.sizes, strict=True)):
        local = local.narrow(dim, begin, size)
    return local


def fill_from(tensor: Tensor, layout: Layout | None, whole: Tensor) -> None:
    """Copies this rank's part of a whole tensor into what it holds."""
    held = local_of(tensor)
    for rectangle in rectangles(tensor, layout):
        source = whole
        for dim, (offset, size) in enumerate(zip(rectangle.offsets, rectangle.sizes, strict=True)):
            source = source.narrow(dim, offset, size)
        view_of(held, rectangle).copy_(source)


def gathered(tensor: Tensor, layout: Layout | None, mesh: DeviceMesh | None) -> Tensor:
    """The whole of a parameter, gradient or buffer; every rank that holds a part of it calls this."""
    part = _all_rows(tensor) if isinstance(tensor, DTensor) else tensor
    if layout is None or isinstance(layout, Lodged):
        return part
    assert mesh is not None
    return whole_of(part, layout, mesh.get_group(layout.axis))


def _all_rows(tensor: DTensor) -> Tensor:
    """As `full_tensor`, which brings a process down where CUDA tensors travel over Gloo."""
    (axis,) = [number for number, placement in enumerate(tensor.placements) if placement.is_shard()]
    group = tensor.device_mesh.get_group(axis)
    rows, ranks = tensor.shape[0], group.size()
    most = -(-rows // ranks)
    division = even(0, [max(0, min(most, rows - most * rank)) for rank in range(ranks)])
    return all_gather(tensor.to_local(), division, Team(group, group.rank(), ranks, "shard"))
