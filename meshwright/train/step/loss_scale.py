"""The factor on an fp16 loss that keeps small gradients above zero. Whether it was too large, all ranks decide.

Gradients that are not finite anywhere, on any rank, make every rank leave the step out and halve the factor; after
`INTERVAL` good steps in a row it is doubled. It is a power of two, so it changes no digit of a gradient.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from meshwright.parallel.clip import by_type
from meshwright.parallel.weights.layout import local_of

START = 2.0**16
INTERVAL = 2000


class LossScale:
    """The same on every rank, since all of them are told the same."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._device = device
        self._ranks = ranks
        self._good = 0  # steps since the last change
        self.value = START
        self.skipped = 0

    def unscale_(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Gives the gradients their true size. False where one of them, on any rank, is not finite: then the factor
        is smaller from now on, and the step is to be left out."""
        unfit = torch.zeros((), device=self._device)
        inverse = torch.full((), 1 / self.value, device=self._device)
        for gradients in by_type(local_of(p.grad) for p in parameters if p.grad is not None):
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, unfit, inverse)
        if self._ranks > 1:
            dist.all_reduce(unfit, dist.ReduceOp.MAX)
        good = not bool(unfit)
        self.follow(good)
        return good

    def follow(self, good: bool) -> None:
        """What a step that was good, or not, does to the factor."""
        self._good = self._good + 1 if good else 0
        if not good:
            self.skipped += 1
            self.value /= 2
        elif self._good == INTERVAL:
            self._good = 0
            self.value *= 2

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "good": self._good, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self._good, self.skipped = float(state["value"]), int(state["good"]), int(state["skipped"])
