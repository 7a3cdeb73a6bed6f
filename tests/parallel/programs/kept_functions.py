"""A statement that calls a custom function by an `apply` that was kept before a plan is applied, in the form of
statements.py. Where torch 2.15 gives such a function divided tensors, their gradient would be lost."""

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from tests.parallel.programs.statements import statement


class Total(Function):
    """Returns no divided tensor, and keeps none for its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].expand(ctx.shape)


total_apply = Total.apply


@statement
def custom_total(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    return x + total_apply(x) * 0.01


REFUSED: dict[str, str] = {}
if not isinstance(Function.__dict__["apply"], classmethod):  # torch 2.15 runs a kept `apply` in C
    REFUSED["custom_total"] = "that was kept before the model was divided"
