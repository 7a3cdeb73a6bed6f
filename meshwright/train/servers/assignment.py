"""Which server holds which parameters: a pure function of their names and sizes, so everybody works it out alone.

Where the optimizer works number by number, it does the same to rows of a parameter as to the whole: all rows in line
are cut into equal stretches. Otherwise whole parameters go, from the largest on, to the server that has least.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.parallel.weights.layout import Lodged

AXIS = "servers"
# Each number's update depends on that number, its gradient and its own history alone.
_BY_NUMBER = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)


@dataclass(frozen=True)
class Piece:
    """`rows` of a parameter from row `first` on; a number without dimensions is a row of its own."""

    name: str
    first: int
    rows: int
    whole: tuple[int, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.whole[1:]) if self.whole else ()

    def of(self, tensor: Tensor) -> Tensor:
        """Its part of a tensor of the whole one's shape, as a view."""
        return tensor.narrow(0, self.first, self.rows) if self.whole else tensor


def works_by_number(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) in _BY_NUMBER


def divide(parameters: Mapping[str, Tensor], servers: int, cut: bool) -> list[list[Piece]]:
    """The pieces of every server, in the parameters' own order. Without `cut` parameters stay whole."""
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in parameters.items()}
    held: list[list[Piece]] = [[] for _ in range(servers)]
    if cut:
        fair, begin = sum(sizes.values()) / servers, 0
        for name, parameter in parameters.items():
            rows = parameter.shape[0] if parameter.dim() else 1
            ends = [_row((server + 1) * fair - begin, sizes[name], rows) for server in range(servers - 1)] + [rows]
            for server, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
                if end > first:
                    held[server].append(Piece(name, first, end - first, tuple(parameter.shape), parameter.dtype))
            begin += sizes[name]
        return held
    loads, owner = [0] * servers, {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owner[name] = loads.index(min(loads))
        loads[owner[name]] += sizes[name]
    for name, parameter in parameters.items():
        rows = parameter.shape[0] if parameter.dim() else 1
        held[owner[name]].append(Piece(name, 0, rows, tuple(parameter.shape), parameter.dtype))
    return held


def _row(place: float, size: int, rows: int) -> int:
    """The row nearest to a place, in bytes from the parameter's beginning."""
    return min(rows, max(0, round(place / size * rows))) if size else 0


def layout_of(piece: Piece) -> Lodged:
    """Where it lies in the whole, as checkpoints want to know it."""
    stretches = ((piece.first, piece.rows),) if piece.whole else ()
    return Lodged(piece.whole, 0, stretches, AXIS, piece.whole[:1])
