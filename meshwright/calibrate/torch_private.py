"""The private functions of torch that calibration calls. They were seen to work on torch 2.11, 2.13 and 2.15."""

import torch
from torch import Tensor


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies int8 matrices; the result is int32. torch has no public operator for this."""
    return torch._int_mm(a, b)


def fp8_product(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Multiplies float8 matrices that share one scale; the result is bfloat16."""
    return torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)


def keep_gpu_busy(cycles: int) -> None:
    """Enqueues a kernel that does nothing for this number of clock cycles on the current CUDA stream."""
    torch.cuda._sleep(cycles)
