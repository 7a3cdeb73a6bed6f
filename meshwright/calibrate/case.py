"""One operator and shape whose time is measured: how to build it, and what it counts as."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from meshwright.cluster.cluster import Layout, Operator
from meshwright.dtypes import Dtype

Run = Callable[[], Tensor]
PRODUCTS: tuple[Dtype, ...] = ("fp32", "tf32", "bf16")
MOVED: tuple[Dtype, ...] = ("fp32", "bf16")


@dataclass(frozen=True)
class Case:
    """`build` makes the inputs and returns the forward pass, from which a backward pass is taken where there is one.

    Elements are those of every tensor that a profile counts (profile/operators.py `bytes_of`), integers apart: the
    same bytes are on both sides when a measured time is looked up.
    """

    operator: Operator
    shape: tuple[int, ...]
    build: Callable[[torch.dtype, torch.device], Run]
    elements: float
    back_elements: float = 0.0
    integer_bytes: float = 0.0
    flops: float = 0.0
    back_flops: float = 0.0
    layout: Layout = "contiguous"
    dtypes: tuple[Dtype, ...] = MOVED

    @property
    def largest_bytes(self) -> float:
        return 4 * max(self.elements, self.back_elements) + self.integer_bytes


def random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, layout: Layout = "contiguous") -> Tensor:
    """A leaf that wants a gradient, of random numbers: zeros would draw less power than real data."""
    values = torch.randn(*shape, dtype=dtype, device=device)
    if layout == "channels_last":
        values = values.to(memory_format=torch.channels_last)
    return values.requires_grad_()


def images_case(
    operator: Operator,
    shape: tuple[int, ...],
    layout: Layout,
    build: Callable[[Tensor], Run],
    elements: float,
    back_elements: float,
    integer_bytes: float = 0.0,
) -> Case:
    """A case on images (n, c, h, w); elements are told as a multiple of theirs."""
    size = prod(shape)
    return Case(
        operator,
        shape,
        lambda dtype, device: build(random(shape, dtype, device, layout)),
        elements * size,
        back_elements * size,
        integer_bytes * size,
        layout=layout,
    )
