"""Classes of DeepSpeed that scripts may import, but that cannot be made here."""

from typing import Any

from torch import nn

from meshwright.compat.deepspeed.errors import CallError


class MoE(nn.Module):
    """A mixture of experts whose experts lie on different ranks. It is refused."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise CallError("deepspeed.moe.layer.MoE is not offered: use a mixture of experts of the model's library")


class FP16_UnfusedOptimizer:
    """DeepSpeed's wrapper of an optimizer in 16 bits. Here the optimizer is not wrapped, so nothing is an instance."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise CallError("FP16_UnfusedOptimizer is not offered: initialize needs no wrapper of the optimizer")


def has_moe_layers(model: nn.Module) -> tuple[bool, int]:
    return False, 0
