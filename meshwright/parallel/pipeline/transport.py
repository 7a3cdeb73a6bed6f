"""Packs activations of different sizes into send buffers of one size, and unpacks received buffers.

PyTorch's pipeline stages send equally many bytes for every microbatch and expect a gradient for every tensor they
receive. Therefore a smaller microbatch is padded to the buffer of the largest one and cut to its size at the receiver,
so that no module sees the padding; and integer tensors are sent as float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from meshwright.errors import MeshwrightError


@dataclass(frozen=True)
class ActivationSpec:
    """Shape and type of one tensor of one microbatch. `dim_order` lists its dimensions from the largest stride to the
    smallest, so that a channels-last image is still channels-last at the receiver."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim_order: tuple[int, ...]

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """The sizes of the dimensions in the order of memory."""
        return tuple(self.shape[dim] for dim in self.dim_order)

    @property
    def differentiable(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def transfer_dtype(self) -> torch.dtype:
        return self.dtype if self.differentiable else torch.float64


@dataclass(frozen=True)
class BufferSpec:
    """Shape and type of the buffer that is sent for one tensor; the same for all microbatches."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def activation_spec(tensor: Tensor) -> ActivationSpec:
    strides = tensor.stride()
    dim_order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))
    if not tensor.permute(dim_order).is_contiguous():
        dim_order = tuple(range(tensor.dim()))
    return ActivationSpec(tuple(tensor.shape), tensor.dtype, dim_order)


def buffer_spec_for(specs: Sequence[ActivationSpec]) -> BufferSpec:
    """The smallest buffer that holds this tensor of every microbatch; `specs` has one entry per microbatch."""
    kinds = {(len(spec.shape), spec.transfer_dtype, spec.dim_order) for spec in specs}
    if len(kinds) > 1:
        raise MeshwrightError(
            "a tensor that crosses a pipeline cut has another dtype, number of dimensions or memory layout in some"
            " microbatches of a step: make it the same in all of them, or put the cut somewhere else"
        )
    return BufferSpec(
        tuple(map(max, zip(*(spec.memory_shape for spec in specs), strict=True))), specs[0].transfer_dtype
    )


def pack_for_send(
    specs: Sequence[ActivationSpec], buffers: Sequence[BufferSpec], values: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Returns the buffers to send, one per value, padded with zeros."""
    # Adding the anchor as an input makes all of them require a gradient, also those computed by frozen weights only.
    anchor = torch.zeros((), device=values[0].device, requires_grad=torch.is_grad_enabled())
    packed: tuple[Tensor, ...] = _Pack.apply(tuple(specs), tuple(buffers), anchor, *values)
    return packed


def unpack_received(specs: Sequence[ActivationSpec], received: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the values that the received buffers hold, without padding."""
    values: tuple[Tensor, ...] = _Unpack.apply(tuple(specs), *received)
    return values


def _pack(value: Tensor, spec: ActivationSpec, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    in_memory_order = value.permute(spec.dim_order).to(dtype)
    if in_memory_order.shape == shape:
        # PyTorch's stages detach it in place, which a view does not allow.
        return in_memory_order.contiguous().detach()
    padded = in_memory_order.new_zeros(shape)
    padded[tuple(slice(0, size) for size in spec.memory_shape)] = in_memory_order
    return padded


def _unpack(buffer: Tensor, spec: ActivationSpec, dtype: torch.dtype) -> Tensor:
    is_padded = buffer.shape != spec.memory_shape
    in_memory_order = buffer[tuple(slice(0, size) for size in spec.memory_shape)] if is_padded else buffer
    original_order = sorted(range(len(spec.dim_order)), key=spec.dim_order.__getitem__)
    return in_memory_order.permute(original_order).to(dtype).detach()


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, *inputs: Any) -> tuple[Tensor, ...]:
        specs, buffers, _, *values = inputs
        ctx.specs, ctx.dtypes = specs, [value.dtype for value in values]  # type: ignore[attr-defined]
        return tuple(
            _pack(value, spec, buffer.shape, buffer.dtype)
            for value, spec, buffer in zip(values, specs, buffers, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        value_grads = [
            _unpack(grad, spec, dtype) if spec.differentiable else None
            for grad, spec, dtype in zip(grads, ctx.specs, ctx.dtypes, strict=True)
        ]
        return None, None, None, *value_grads


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, *inputs: Any) -> tuple[Tensor, ...]:
        specs, *buffers = inputs
        ctx.specs = specs  # type: ignore[attr-defined]
        ctx.buffers = [BufferSpec(tuple(buffer.shape), buffer.dtype) for buffer in buffers]  # type: ignore[attr-defined]
        values = tuple(_unpack(buffer, spec, spec.dtype) for buffer, spec in zip(buffers, specs, strict=True))
        ctx.mark_non_differentiable(*(v for v, spec in zip(values, specs, strict=True) if not spec.differentiable))
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        buffer_grads = [
            _pack(grad, spec, buffer.shape, buffer.dtype)
            if spec.differentiable
            else torch.zeros(buffer.shape, dtype=buffer.dtype, device=grad.device)
            for grad, spec, buffer in zip(grads, ctx.specs, ctx.buffers, strict=True)
        ]
        return None, *buffer_grads
