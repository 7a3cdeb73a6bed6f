"""`LiftCasts`: in a comparison in fp64, the model's own conversions to fp32 become conversions to fp64.

Many models convert attention scores, norms or the logits of their loss to fp32, whatever the dtype of their weights is.
In fp64 that would round to fp32 in the middle of the model, and hide every difference below 1e-7. One device and the
ranks both run within this context.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.proof.torch_private import backward_passes_in


class LiftCasts(TorchFunctionMode):
    """Within this context, a request for fp32 (`x.float()`, `x.to(torch.float32)`, `softmax(x, dtype=torch.float32)`)
    is answered with fp64. `lifted` counts the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.lifted = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            # Blocks may be recomputed in there, and torch has left this context to call this method.
            with backward_passes_in(self):
                return func(*args, **kwargs)
        if func is Tensor.float:
            self.lifted += 1
            return args[0].double(**kwargs)
        if kwargs.get("dtype") is torch.float32:
            self.lifted += 1
            kwargs = {**kwargs, "dtype": torch.float64}
        if func in (Tensor.to, Tensor.type) and torch.float32 in args[1:]:
            self.lifted += 1
            args = (args[0], *(torch.float64 if argument is torch.float32 else argument for argument in args[1:]))
        return func(*args, **kwargs)
