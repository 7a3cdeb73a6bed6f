"""Stand-ins for what torchtitan needs of a GPU, so that its Trainer trains on CPU ranks over Gloo."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed
from torch import Tensor
from torch.nn import functional as F

_TRITON_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"  # of experts, which import triton


class _Missing(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def install() -> None:
    """Must be called before torchtitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    sys.modules[_TRITON_KERNELS] = _Missing(_TRITON_KERNELS)
    torch.distributed.set_timeout = lambda *args: None  # of a later torch
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda *args: "CPU"
    cpu.get_device_properties = lambda *args: SimpleNamespace(total_memory=2**34)
    cpu.memory_stats = lambda *args: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *args: None
    cpu.current_device = lambda: 0


def reduce_by_sums() -> None:
    """Gloo has no sum of products, which FSDP takes for the gradient's division by 1. A plain sum is the same."""
    from torch.distributed.fsdp import FSDPModule

    original = FSDPModule.set_gradient_divide_factor

    def set_factor(module: Any, factor: float) -> None:
        original(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_factor


def replace_flex_attention() -> None:
    """FlexAttention has no backward on the CPU. Here it is the same attention with the whole mask."""
    from torchtitan.models.common.attention import FlexAttention

    FlexAttention._compiled_flex_attn = staticmethod(_attention)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, scale: float | None, **options: Any
) -> Any:
    rows, _, length, _ = query.shape
    places = torch.arange(length)
    row, head = torch.arange(rows).view(-1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.long)
    mask = block_mask.mask_mod(row, head, places.view(1, 1, -1, 1), places.view(1, 1, 1, -1))
    grouped = options.get("enable_gqa", False)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped), None
