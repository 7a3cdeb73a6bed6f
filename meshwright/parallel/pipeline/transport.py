"""How values travel between stages: as many bytes for every microbatch, and with a gradient for each of them.

A value is padded to the room that the largest microbatch needs and cut to its own size at the receiver, so that no
module sees the padding. Numbers that are no floats travel as floats: PyTorch's stages want a gradient for everything
that they receive.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from meshwright.errors import MeshwrightError


@dataclass(frozen=True)
class Line:
    """One value of a microbatch. `order` are its dimensions as they lie in memory, so that images with their channels
    last keep them there."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]

    @property
    def lying(self) -> tuple[int, ...]:
        return tuple(self.shape[dim] for dim in self.order)

    @property
    def differentiable(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def wire_dtype(self) -> torch.dtype:
        return self.dtype if self.differentiable else torch.float64


@dataclass(frozen=True)
class Room:
    """What travels: the same for all microbatches."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def holds(self, line: Line) -> bool:
        fits = len(self.shape) == len(line.shape) and all(a >= b for a, b in zip(self.shape, line.lying, strict=True))
        return fits and self.dtype == line.wire_dtype


def line_of(tensor: Tensor) -> Line:
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))
    if not tensor.permute(order).is_contiguous():
        order = tuple(range(tensor.dim()))
    return Line(tuple(tensor.shape), tensor.dtype, order)


def room_for(lines: Sequence[Line]) -> Room:
    """Room for one value in each of these microbatches."""
    kinds = {(len(line.shape), line.wire_dtype, line.order) for line in lines}
    if len(kinds) > 1:
        raise MeshwrightError("a value that crosses a cut has another type or layout in some microbatches of a step")
    return Room(tuple(map(max, zip(*(line.lying for line in lines), strict=True))), lines[0].wire_dtype)


def depart(lines: Sequence[Line], rooms: Sequence[Room], values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What is sent for these values."""
    # With the anchor all of them have a gradient, also where only frozen weights made them.
    anchor = torch.zeros((), device=values[0].device, requires_grad=torch.is_grad_enabled())
    sent: tuple[Tensor, ...] = _Depart.apply(tuple(lines), tuple(rooms), anchor, *values)
    return sent


def arrive(lines: Sequence[Line], received: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The values of what was received."""
    values: tuple[Tensor, ...] = _Arrive.apply(tuple(lines), *received)
    return values


def _packed(value: Tensor, line: Line, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    lying = value.permute(line.order).to(dtype)
    if lying.shape == shape:
        # Detached: a view could not be cut from its graph, as PyTorch's stages do.
        return lying.contiguous().detach()
    padded = lying.new_zeros(shape)
    padded[tuple(slice(0, size) for size in line.lying)] = lying
    return padded


def _unpacked(wire: Tensor, line: Line, dtype: torch.dtype) -> Tensor:
    lying = wire[tuple(slice(0, size) for size in line.lying)] if wire.shape != line.lying else wire
    back = sorted(range(len(line.order)), key=line.order.__getitem__)
    return lying.permute(back).to(dtype).detach()


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, *given: Any) -> tuple[Tensor, ...]:
        lines, rooms, _, *values = given
        ctx.lines, ctx.dtypes = lines, [value.dtype for value in values]  # type: ignore[attr-defined]
        return tuple(_packed(v, line, r.shape, r.dtype) for v, line, r in zip(values, lines, rooms, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = [
            _unpacked(grad, line, dtype) if line.differentiable else None
            for grad, line, dtype in zip(grads, ctx.lines, ctx.dtypes, strict=True)
        ]
        return None, None, None, *found


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, *given: Any) -> tuple[Tensor, ...]:
        lines, *wires = given
        ctx.lines, ctx.rooms = lines, [(tuple(w.shape), w.dtype) for w in wires]  # type: ignore[attr-defined]
        values = tuple(_unpacked(wire, line, line.dtype) for wire, line in zip(wires, lines, strict=True))
        ctx.mark_non_differentiable(*(v for v, line in zip(values, lines, strict=True) if not line.differentiable))
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = []
        for grad, line, (shape, dtype) in zip(grads, ctx.lines, ctx.rooms, strict=True):
            found.append(
                _packed(grad, line, shape, dtype)
                if line.differentiable
                else torch.zeros(shape, dtype=dtype, device=grad.device)
            )
        return None, *found
