"""Which backward passes are split into the gradients of inputs and those of weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.parallel.differentiable_collectives import scale_gradient
from meshwright.parallel.pipeline.runner import has_custom_function


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2


def test_custom_functions_and_reentrant_checkpoints_are_found_behind_other_operators() -> None:
    layer, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    custom: Any = Double.apply(layer(x))
    assert has_custom_function([x.sin(), layer(custom)])
    assert has_custom_function([layer(checkpoint(layer, x, use_reentrant=True)).sum()])


def test_other_checkpoints_and_our_own_functions_are_known() -> None:
    layer, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    assert not has_custom_function([layer(checkpoint(layer, x, use_reentrant=False))])
    assert not has_custom_function([layer(scale_gradient(x, 0.5)), torch.ones(2)])
