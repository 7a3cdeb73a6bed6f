"""Describes divided tensors as chunks of the whole tensor, so that a checkpoint does not depend on the plan."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.parallel.weights.layout import ParameterLayout, local_tensor, region_view, shard_regions, whole_shape

Box = tuple[tuple[int, ...], tuple[int, ...]]  # a region of a tensor: where it begins and its size, per dimension


class ChunkedTensor:
    """This rank's part of a tensor that the tensor, replicate, shard or pipeline axis may divide among ranks: each
    region of the whole tensor that the rank holds is one chunk."""

    def __init__(self, tensor: Tensor, layout: ParameterLayout | None) -> None:
        self.tensor = tensor
        self.shape = whole_shape(tensor, layout)
        self._regions = {(region.offsets, region.sizes): region for region in shard_regions(tensor, layout)}

    @property
    def boxes(self) -> list[Box]:
        """The regions of the whole tensor that this rank holds."""
        return list(self._regions)

    def view(self, box: Box) -> Tensor:
        """A view of this rank's memory of one of its regions."""
        return region_view(local_tensor(self.tensor.detach()), self._regions[box])


def as_chunked(value: Any, layout: ParameterLayout | None) -> Any:
    """Returns a `ChunkedTensor` for a tensor that is divided among ranks, and any other value unchanged."""
    is_divided = isinstance(value, Tensor) and (layout is not None or isinstance(value, DTensor))
    return ChunkedTensor(value, layout) if is_divided else value


def local_value(value: Any) -> Any:
    """The inverse of `as_chunked`: returns the tensor with this rank's memory for a `ChunkedTensor`, and any other
    value unchanged."""
    return value.tensor if isinstance(value, ChunkedTensor) else value


def chunks_of(value: ChunkedTensor | Tensor) -> dict[Box, Tensor]:
    """Returns this rank's memory of each region that it holds of a tensor. A tensor that is not divided is one
    region."""
    if isinstance(value, ChunkedTensor):
        return {box: value.view(box) for box in value.boxes}
    return {(tuple([0] * value.dim()), tuple(value.shape)): value.detach()}


def overlap(first: Box, second: Box) -> Box | None:
    """Returns the region that two regions share; None if they share no element."""
    begin = tuple(max(a, b) for a, b in zip(first[0], second[0], strict=True))
    end = tuple(min(a + n, b + m) for a, n, b, m in zip(*first, *second, strict=True))
    sizes = tuple(e - b for b, e in zip(begin, end, strict=True))
    return None if any(size <= 0 for size in sizes) else (begin, sizes)


def narrow(tensor: Tensor, origin: tuple[int, ...], box: Box) -> Tensor:
    """A view of the region `box` of the whole tensor in a tensor that begins at `origin` of the whole tensor."""
    for dim, (start, begin, size) in enumerate(zip(origin, *box, strict=True)):
        tensor = tensor.narrow(dim, begin - start, size)
    return tensor
