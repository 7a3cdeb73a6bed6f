"""Operators as torch 1.5 to 1.10 ran them, with which the published rows were measured. Today's operators save less for
the backward pass.

- softmax and log-softmax saved their input besides their output; their gradients read its dtype.
- The gradient of softmax (not of log-softmax) begins with a product of the output and its gradient.
- Dropout on a GPU saves one byte per element. The CPU, on which models are traced, would save four.
"""

from typing import Any

import torch
from torch import Tensor


class _Softmax(torch.autograd.Function):
    """Softmax that saves its input for the backward pass without using it."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dim: int, log: bool) -> Tensor:
        output = torch.log_softmax(scores, dim) if log else torch.softmax(scores, dim)
        ctx.save_for_backward(scores, output)
        ctx.dim, ctx.log = dim, log
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _, output = ctx.saved_tensors
        if ctx.log:
            return torch._log_softmax_backward_data(grad, output, ctx.dim, output.dtype), None, None
        product = grad * output
        result = torch._softmax_backward_data(grad, output, ctx.dim, output.dtype)
        del product
        return result, None, None


def softmax(scores: Tensor, dim: int) -> Tensor:
    result: Tensor = _Softmax.apply(scores, dim, False)
    return result


def log_softmax(scores: Tensor, dim: int) -> Tensor:
    result: Tensor = _Softmax.apply(scores, dim, True)
    return result


def dropout(values: Tensor, probability: float) -> Tensor:
    if not probability:
        return values
    result: Tensor = torch.native_dropout(values, probability, True)[0]
    return result
