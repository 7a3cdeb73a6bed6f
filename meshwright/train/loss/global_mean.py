"""`GlobalMean`: the mean over the samples of all data ranks, of which a rank has computed its own part, as a function
with a gradient."""

from collections import deque
from typing import Any

import torch
from torch import Tensor


class GlobalMean(torch.autograd.Function):
    """Returns `mean`; its gradient with respect to `value`, this rank's part of it, is `scale`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, scale: Tensor, mean: Tensor) -> Tensor:
        ctx.scale = scale
        return mean.to(value.dtype).reshape(value.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.scale.to(gradient.dtype), None, None


def is_mean_of_ranks(loss: Tensor) -> bool:
    """Whether the loss was computed from a `GlobalMean`. Those are near the loss, so the search is short unless there
    is none."""
    waiting, seen = deque([loss.grad_fn]), set()
    while waiting:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        if node.name() == "GlobalMeanBackward":
            return True
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
    return False
