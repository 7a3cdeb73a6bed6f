"""The one table of number formats: our names for them, torch's dtypes and their names, sizes and autocast dtypes.

Plans, clusters and calibrations use our names (`Dtype`). Traces and tensors use torch's names ("float32", ...). `tf32`
is no dtype of a tensor: it is fp32 whose products and convolutions round their inputs to 10 bits of mantissa.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from meshwright.version import warn_of_untried_torch

warn_of_untried_torch()  # here, because whatever computes with torch imports this table first

Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)


@dataclass(frozen=True)
class NumberFormat:
    """One row of the table `FORMATS`.

    `tensor` is the torch dtype of tensors in this format. `autocast` is the dtype that a plan of this precision passes
    to torch.autocast, or None if such a plan runs without autocast. `rounding` is a torch dtype with the same number of
    mantissa bits, or None for formats whose rounding errors are never estimated.
    """

    tensor: torch.dtype
    autocast: torch.dtype | None = None
    rounding: torch.dtype | None = None


FORMATS: dict[Dtype, NumberFormat] = {
    "fp64": NumberFormat(torch.float64),
    "fp32": NumberFormat(torch.float32),
    "tf32": NumberFormat(torch.float32, rounding=torch.float16),
    "bf16": NumberFormat(torch.bfloat16, autocast=torch.bfloat16, rounding=torch.bfloat16),
    "fp16": NumberFormat(torch.float16, autocast=torch.float16, rounding=torch.float16),
    "fp8": NumberFormat(torch.float8_e4m3fn, autocast=torch.bfloat16, rounding=torch.float8_e4m3fn),
    "int8": NumberFormat(torch.int8),
}
HALF_FORMATS: tuple[Dtype, ...] = ("bf16", "fp16")
# of the floating-point tensors in profiles; fp8 is that of products (simulator/compute/float8.py)
_TRACED_FORMATS: tuple[Dtype, ...] = ("fp64", "fp32", *HALF_FORMATS, "fp8")

# ---- by our name

TORCH_DTYPES: dict[Dtype, torch.dtype] = {name: row.tensor for name, row in FORMATS.items()}
# These three are looked up with a plan's words, some of which ("auto", "none") are no format: hence the keys are `str`.
AUTOCAST_DTYPES: dict[str, torch.dtype] = {name: row.autocast for name, row in FORMATS.items() if row.autocast}
ROUNDING_DTYPES: dict[str, torch.dtype] = {name: row.rounding for name, row in FORMATS.items() if row.rounding}
HALF_DTYPES: dict[str, torch.dtype] = {name: TORCH_DTYPES[name] for name in HALF_FORMATS}

# ---- by torch's name


def torch_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype without its module, such as "float32"."""
    return str(dtype).removeprefix("torch.")


DTYPE_NAMES: dict[str, Dtype] = {torch_name(TORCH_DTYPES[name]): name for name in _TRACED_FORMATS}
DTYPES_BY_TORCH_NAME: dict[str, torch.dtype] = {name: TORCH_DTYPES[ours] for name, ours in DTYPE_NAMES.items()}
ITEM_BYTES: dict[str, int] = {name: dtype.itemsize for name, dtype in DTYPES_BY_TORCH_NAME.items()}

# In the files of a checkpoint every piece of a tensor begins at a multiple of this many bytes, so that it can be mapped
# into memory.
PIECE_ALIGNMENT = 64


class TensorStandIn:
    """The base class of objects that stand for a tensor in functions that torch compiles."""

    dtype: torch.dtype

    def float(self) -> object:
        raise NotImplementedError


def widen_half(value: object) -> object:
    """Returns a bf16 or fp16 tensor converted to fp32, and every other value unchanged."""
    if isinstance(value, (torch.Tensor, TensorStandIn)) and value.dtype in HALF_DTYPES.values():
        return value.float()
    return value


@contextmanager
def float32_matmul_precision(dtype: Dtype) -> Iterator[None]:
    """Within this context, fp32 products and convolutions round their inputs to tf32 if `dtype` is tf32, else not."""
    matmul_precision, cudnn_allows = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul_precision)
        torch.backends.cudnn.allow_tf32 = cudnn_allows
