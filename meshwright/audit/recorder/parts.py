"""`Held`: a tensor of the model of which this rank holds parts, and where these lie in the whole tensor."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Read = Callable[[], Tensor | None]


@dataclass(frozen=True)
class Region:
    """A region of a whole tensor: a box (start and size in each dimension), or a range of the flattened tensor.

    `blocks` is for fused weights: the last dimension named by `dim` consists of so many equal blocks, and the rank
    holds the same share of each, one after the other; then `box` is that of its first block."""

    box: tuple[tuple[int, int], ...] | None = None
    flat: tuple[int, int] | None = None
    dim: int = 0
    blocks: int = 1

    def of(self, whole: Tensor) -> Tensor:
        """The region of a whole tensor, as a view where that is possible."""
        if self.flat is not None:
            return whole.reshape(-1)[self.flat[0] : self.flat[1]]
        assert self.box is not None
        pieces = [self._block(whole, block) for block in range(self.blocks)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def write(self, whole: Tensor, part: Tensor) -> None:
        """Writes the part into its region of a whole tensor, which is contiguous."""
        if self.flat is not None:
            whole.view(-1)[self.flat[0] : self.flat[1]] = part.reshape(-1)
            return
        for block, piece in enumerate(part.chunk(self.blocks, self.dim) if self.blocks > 1 else [part]):
            view = self._block(whole, block)
            view.copy_(piece.reshape(view.shape))

    def _block(self, whole: Tensor, block: int) -> Tensor:
        view = whole
        for dim, (start, size) in enumerate(self.box or ()):
            shift = block * (whole.shape[dim] // self.blocks) if dim == self.dim and self.blocks > 1 else 0
            view = view.narrow(dim, start + shift, size)
        return view

    def to_json(self) -> dict[str, Any]:
        if self.flat is not None:
            return {"flat": list(self.flat)}
        described: dict[str, Any] = {"box": [list(pair) for pair in self.box or ()]}
        return described | ({"dim": self.dim, "blocks": self.blocks} if self.blocks > 1 else {})

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Region":
        if "flat" in value:
            return cls(flat=(int(value["flat"][0]), int(value["flat"][1])))
        box = tuple((int(start), int(size)) for start, size in value["box"])
        return cls(box=box, dim=int(value.get("dim", 0)), blocks=int(value.get("blocks", 1)))


def whole_region(shape: Sequence[int]) -> Region:
    return Region(box=tuple((0, size) for size in shape))


@dataclass(frozen=True)
class Part:
    """A part that this rank holds: its region, and how its values and its gradient are read. `weight` returns the
    storage that training uses, so that a start can be written into it."""

    region: Region
    weight: Read
    gradient: Read

    def read_weight(self) -> Tensor | None:
        return self.weight()

    def read_gradient(self) -> Tensor | None:
        return self.gradient()


@dataclass
class Held:
    """A parameter or buffer of the model under its name. `ids` are those of the parameters that optimizers know it
    by. `layout` says where the layout is known from. `same_as` is the first name of a tied parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    trained: bool = True
    layout: str = "whole"
    same_as: str | None = None
    reference_name: str | None = None
    ids: tuple[int, ...] = field(default=())

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "trained": self.trained,
            "layout": self.layout,
            "same_as": self.same_as,
            "reference_name": self.reference_name,
            "parts": [part.region.to_json() for part in self.parts],
        }
