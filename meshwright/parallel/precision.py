"""In which precision a forward pass computes."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from meshwright.plan import Plan


def forward_precision(plan: Plan, device_type: str) -> AbstractContextManager[Any]:
    """The context a model's forward pass runs in. Make a new one for each pass."""
    if plan.numerics.precision == "bf16":
        return torch.autocast(device_type, dtype=torch.bfloat16)
    return nullcontext()
