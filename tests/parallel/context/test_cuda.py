"""Attention of tiles on a GPU: the flash kernels give the output, log-sum and gradients of plain products."""

import pytest
import torch
from torch import Tensor

from meshwright.parallel.context.tiles import Tile, attend, gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def of_tile(causal: bool, dtype: torch.dtype, keys: int) -> list[Tensor]:
    """Output, log-sum and gradients in this dtype: in half precision by the flash kernels."""
    torch.manual_seed(0)
    query, grad = (torch.randn(2, 4, 128, 64, device="cuda").to(torch.bfloat16).to(dtype) for _ in range(2))
    key, value = (torch.randn(2, 4, keys, 64, device="cuda").to(torch.bfloat16).to(dtype) for _ in range(2))
    tile = Tile((0, 128), (0, keys), causal)
    output, log_sum = attend(query, key, value, tile, 0.125)
    return [output, log_sum, *gradients(grad, query, key, value, tile, output, log_sum, 0.125)]


@pytest.mark.parametrize(("causal", "keys"), [(False, 192), (True, 128)])
def test_flash_kernels_give_what_products_give(causal: bool, keys: int) -> None:
    for half, double in zip(of_tile(causal, torch.bfloat16, keys), of_tile(causal, torch.float64, keys), strict=True):
        assert half.dtype in (torch.bfloat16, torch.float32)
        torch.testing.assert_close(half.double(), double, rtol=0.02, atol=0.02)
