"""`OperatorCase`: one operator and shape that calibration times, with its FLOPs and bytes."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from meshwright.cluster.cluster import MeasuredOperator, MemoryLayout
from meshwright.dtypes import Dtype

TimedCall = Callable[[], Tensor]
COMPUTE_BOUND_DTYPES: tuple[Dtype, ...] = ("fp32", "tf32", "bf16")
MEMORY_BOUND_DTYPES: tuple[Dtype, ...] = ("fp32", "bf16")


@dataclass(frozen=True)
class OperatorCase:
    """`build` creates the inputs and returns a function that runs the forward pass. Where `backward_elements` is above
    zero, the backward pass is timed too.

    `elements` counts the floating-point numbers of the tensors that a profile counts (`bytes_of` in profile/), and
    `integer_bytes` the bytes of the integer ones, so that measured and profiled operators agree on their bytes.
    """

    operator: MeasuredOperator
    shape: tuple[int, ...]
    build: Callable[[torch.dtype, torch.device], TimedCall]
    elements: float
    backward_elements: float = 0.0
    integer_bytes: float = 0.0
    flops: float = 0.0
    backward_flops: float = 0.0
    layout: MemoryLayout = "contiguous"
    dtypes: tuple[Dtype, ...] = MEMORY_BOUND_DTYPES

    @property
    def largest_bytes(self) -> float:
        return 4 * max(self.elements, self.backward_elements) + self.integer_bytes


def random_leaf(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, layout: MemoryLayout = "contiguous"
) -> Tensor:
    """Returns a leaf tensor of random numbers that requires a gradient. With zeros a device would draw less power
    than with real data."""
    values = torch.randn(*shape, dtype=dtype, device=device)
    if layout == "channels_last":
        values = values.to(memory_format=torch.channels_last)
    return values.requires_grad_()


def images_case(
    operator: MeasuredOperator,
    shape: tuple[int, ...],
    layout: MemoryLayout,
    build: Callable[[Tensor], TimedCall],
    elements: float,
    backward_elements: float,
    integer_bytes: float = 0.0,
) -> OperatorCase:
    """Returns a case on images of shape (n, c, h, w). Elements and bytes are given per element of the images."""
    size = prod(shape)
    return OperatorCase(
        operator,
        shape,
        lambda dtype, device: build(random_leaf(shape, dtype, device, layout)),
        elements * size,
        backward_elements * size,
        integer_bytes * size,
        layout=layout,
    )
