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
    """One operator and shape to time. `build` creates the inputs and returns a function that runs the forward pass. If
    `backward_elements` is above zero, the backward pass is timed too.

    `elements` and `backward_elements` are the numbers of floating-point values that the passes read and write,
    `integer_bytes` the bytes of the integer tensors among their inputs and outputs. They count the same tensors as a
    profile does (`bytes_of` in profile/), so that measured and profiled operators agree on their bytes.
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
    """Returns a case on images of shape (n, c, h, w). `elements`, `backward_elements` and `integer_bytes` are given per
    element of the images."""
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
