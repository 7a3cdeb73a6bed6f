"""`compute_loss`: the loss of a training step. Tracing uses it in place of the training session's code."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.dtypes import HALF_DTYPES
from meshwright.errors import InputError
from meshwright.model_io.batch import at_least_fp32, find_model_value, split_batch, target_key

LossFunction = Callable[[Any, Any], Any]


def compute_loss(model: nn.Module, batch: Any, loss: LossFunction | None, precision: str, target: str | None) -> Tensor:
    """Returns the loss of one microbatch, as a tensor with one element. The forward pass runs in the plan's precision,
    the loss in at least fp32. If `loss` is None, the loss is taken from the model's output. If the loss is a pair (sum,
    count), the sum is returned."""
    inputs = split_batch(batch, target_key(target, loss is not None))
    with torch.autocast("cpu", dtype=HALF_DTYPES.get(precision), enabled=precision in HALF_DTYPES):
        output = model(*inputs.arguments, **inputs.keywords)
    output = at_least_fp32(output)
    result = loss(output, inputs.target) if loss else find_model_value(output)
    value = result[0] if isinstance(result, tuple) else result
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise InputError("the loss returns no number: it must be a scalar, or a pair (sum, count)")
    return value
