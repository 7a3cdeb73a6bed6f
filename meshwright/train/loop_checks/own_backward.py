"""What a loop that calls backward itself gave as a loss."""

from typing import Any

from torch import Tensor


def describe_loss(value: Any) -> str:
    """Returns what a user gave as a loss: its class, or of a tensor the shape, and whether it has no gradient."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)}{'' if value.requires_grad else ' without a gradient'}"
