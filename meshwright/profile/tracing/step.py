"""How a training step computes its loss, as the session does it, for tracing."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.batch import at_least_fp32, split
from meshwright.errors import InputError

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
LossFunction = Callable[[Any, Any], Any]


def loss_of(model: nn.Module, batch: Any, loss: LossFunction | None, precision: str, target: str | None) -> Tensor:
    """The loss of one microbatch: the forward pass in the plan's precision, the loss in at least fp32."""
    example = split(batch, target)
    with torch.autocast("cpu", dtype=_AUTOCAST.get(precision), enabled=precision in _AUTOCAST):
        output = model(*example.arguments, **example.keywords)
    output = at_least_fp32(output)
    result = loss(output, example.target) if loss else _own_loss(output)
    value = result[0] if isinstance(result, tuple) else result
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise InputError("the loss returns no number: it must be a scalar, or a pair (sum, count)")
    return value


def _own_loss(output: Any) -> Any:
    """Of a model that returns its loss."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
