"""The number formats that plans, clusters and kernels are described in, and what torch calls them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch

Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


@contextmanager
def float32_products(dtype: Dtype) -> Iterator[None]:
    """Whether fp32 products and convolutions may round their inputs to tf32, within a block."""
    before, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = cudnn
