"""The tensors that ranks reduce in these tests, and the results that one process computes for them."""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = (0, 1, 7, 63, 64, 65, 1000, 4097, 16385, 100_003)


def rank_tensor(rank: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Returns the tensor that a rank contributes. Every rank can generate the tensors of all ranks."""
    generator = torch.Generator().manual_seed(1000 * seed + 17 * size + rank)
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, (size,), generator=generator)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * 10).to(dtype)


def reference(tensors: list[Tensor], *, mean: bool = True) -> Tensor:
    """Returns the mean or the sum that all ranks must get, computed in one process in the order of the ranks."""
    sum_dtype = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else tensors[0].dtype
    total = tensors[0].to(sum_dtype, copy=True)
    for tensor in tensors[1:]:
        total += tensor.to(sum_dtype)
    return (total / len(tensors) if mean else total).to(tensors[0].dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
