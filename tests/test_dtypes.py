"""The table of number formats relates our names, torch's names, torch's dtypes and item sizes consistently."""

import torch

from meshwright.dtypes import (
    AUTOCAST_DTYPES,
    DTYPE_NAMES,
    DTYPES,
    DTYPES_BY_TORCH_NAME,
    ITEM_BYTES,
    TORCH_DTYPES,
    float32_matmul_precision,
    torch_name,
    widen_half,
)


def test_every_format_has_a_torch_dtype() -> None:
    assert set(TORCH_DTYPES) == set(DTYPES)


def test_names_and_sizes_of_traced_dtypes_belong_together() -> None:
    names = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
    assert names == DTYPE_NAMES
    for name, dtype in DTYPES_BY_TORCH_NAME.items():
        assert torch_name(dtype) == name
        assert TORCH_DTYPES[DTYPE_NAMES[name]] is dtype
        assert ITEM_BYTES[name] == torch.empty((), dtype=dtype).element_size()


def test_fp8_runs_under_the_autocast_of_bf16_and_fp32_without_any() -> None:
    assert AUTOCAST_DTYPES["fp8"] is AUTOCAST_DTYPES["bf16"] is torch.bfloat16
    assert not {"fp64", "fp32", "tf32"} & AUTOCAST_DTYPES.keys()


def test_only_half_precision_tensors_are_widened() -> None:
    double = torch.zeros(1, dtype=torch.float64)
    assert widen_half(double) is double
    assert widen_half("a word") == "a word"
    widened = widen_half(torch.zeros(1, dtype=torch.float16))
    assert isinstance(widened, torch.Tensor)
    assert widened.dtype is torch.float32


def test_the_precision_of_fp32_products_is_restored() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with float32_matmul_precision("tf32"):
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", True)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
