"""`LossScale`: the factor by which an fp16 loss is multiplied, so that small gradients do not become zero.

When any gradient on any rank is not finite, every rank skips the step and halves the factor. After `interval` finite
steps in a row the factor is doubled. Because it is a power of two, scaling by it does not round gradients. A job's
`train.loss_scale` changes these rules.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from meshwright.errors import TrainingDiverged
from meshwright.parallel.clip import group_by_dtype_and_device
from meshwright.parallel.weights.layout import local_tensor
from meshwright.train.torch_private import unscale_and_check_finite_
from meshwright.user.job_sections import LossScaleSettings

# If gradients overflow fp16 below the default `lowest`, the factor is not the reason: they are NaN or much too large.
DEFAULTS = LossScaleSettings()
START, INTERVAL = DEFAULTS.start, DEFAULTS.interval


class LossScale:
    """Holds and adapts the loss scale. `value` is the factor, which is the same on every rank, and `skipped` the number
    of skipped steps."""

    def __init__(self, device: torch.device, ranks: int, settings: LossScaleSettings = DEFAULTS) -> None:
        self._device = device
        self._ranks = ranks
        self._settings = settings
        self._good = 0  # finite steps since the last change
        self._tolerated = 0  # overflows since the last change that did not halve the factor
        self.value = settings.fixed or settings.start
        self.skipped = 0

    def unscale_(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Divides the gradients by the factor, and updates the factor. Returns False if a gradient on any rank is not
        finite. The caller must then skip the step."""
        overflow = torch.zeros((), device=self._device)
        for gradients in group_by_dtype_and_device(local_tensor(p.grad) for p in parameters if p.grad is not None):
            device = gradients[0].device  # with offloaded parameters, not the device of the rank
            in_group, inverse = torch.zeros((), device=device), torch.full((), 1 / self.value, device=device)
            unscale_and_check_finite_(gradients, in_group, inverse)
            overflow += in_group.to(self._device)
        if self._ranks > 1:
            dist.all_reduce(overflow, dist.ReduceOp.MAX)
        is_finite = not bool(overflow)
        self.update(is_finite)
        return is_finite

    def update(self, is_finite: bool) -> None:
        """Updates the factor after a step whose gradients were finite, or not. Raises `TrainingDiverged` below the
        lowest factor, on all ranks in the same step."""
        settings = self._settings
        self._good = self._good + 1 if is_finite else 0
        self.skipped += not is_finite
        if settings.fixed is not None:
            return
        if not is_finite:
            self._tolerated += 1
            if self._tolerated >= settings.hysteresis:
                self._halve()
            return
        if settings.consecutive_hysteresis:
            self._tolerated = 0
        if self._good == settings.interval:
            self._good = self._tolerated = 0
            self.value *= 2

    def _halve(self) -> None:
        settings = self._settings
        # Further overflows halve it at once, until enough finite steps have doubled it again.
        self._tolerated = settings.hysteresis - 1
        if self.value / 2 < settings.lowest:
            raise TrainingDiverged(
                f"gradients in fp16 are not finite even with a loss scale of {settings.lowest}: look at the data of"
                " these steps, lower the learning rate, or train in bf16 or fp32"
            )
        self.value /= 2

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "good": self._good, "skipped": self.skipped, "tolerated": self._tolerated}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self._good, self.skipped = float(state["value"]), int(state["good"]), int(state["skipped"])
        self._tolerated = int(state.get("tolerated", 0))
