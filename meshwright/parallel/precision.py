"""In which precision a forward pass computes. Losses are computed in at least fp32 in every precision."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map

from meshwright.plan import Plan


def forward_precision(plan: Plan, device_type: str) -> AbstractContextManager[Any]:
    """The context a model's forward pass runs in. Make a new one for each pass."""
    if plan.numerics.precision == "bf16":
        return torch.autocast(device_type, dtype=torch.bfloat16)
    return nullcontext()


def at_least_fp32(output: Any) -> Any:
    """A model's output with its half-precision tensors widened, whatever structure it has."""

    def widen(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
            return value.float()
        return value

    return tree_map(widen, output)
