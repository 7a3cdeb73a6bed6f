"""The mean over a global batch: what a rank multiplies its part of the loss by, and the loss that all ranks hear."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.clip import by_type
from meshwright.parallel.model import Examples, ParallelModel
from meshwright.parallel.weights.layout import local_of
from meshwright.train.step.loss import Loss
from meshwright.train.step.loss_scale import LossScale


class Mean:
    """Forward and backward passes of a step. `count` is that of the last step's targets, where somebody else divides by
    it; 0: by nothing."""

    def __init__(
        self,
        parallel: ParallelModel,
        loss: Loss,
        loss_scale: LossScale | None,
        report: Callable[[str], None],
    ) -> None:
        self._parallel = parallel
        self._plan = parallel.plan
        self._device = parallel.device
        self._loss = loss
        self._loss_scale = loss_scale
        self._report = report
        self._counts_itself: bool | None = None  # what a rank that sees no loss was told of it
        self.count: Tensor | float = 0.0

    def __call__(self, examples: Examples, global_samples: int | None, *, served: bool = False) -> Tensor:
        """Leaves the mean gradient over the global batch in the parameters, and returns the mean loss. `served`: leaves
        the sum over the rank's own samples, which `count` goes with, and returns the loss's sum.

        The gradients of ranks with other samples are averaged, so each one's sum is multiplied by data ranks / global
        count. The count is known beforehand or summed up while the forward pass runs; the loss's own sum travels beside
        backward. Of ranks with the same samples one speaks for all.
        """
        ranks = self._plan.data_ranks
        total = self._start_total(examples, global_samples, served)
        told: list[Tensor] = []  # the loss's sum, and the count that it tells itself
        reduced: list[Callable[[], Sequence[Tensor]]] = []

        def last_of_step(number: int) -> bool:
            """Where a sum can travel beside the backward pass; that of stages is full of messages already."""
            return number == len(examples) - 1 and self._plan.axes.pipeline == 1

        def loss_of(number: int, output: Any) -> Tensor:
            example, samples = examples[number]
            term = self._loss.term(output, example.target, samples)
            now = [term.sum] if term.own_count is None else [term.sum, term.own_count]
            told[:] = [before + more for before, more in zip(told, now, strict=True)] if told else now
            scale = term.weight * ranks / total()
            if last_of_step(number):
                reduced.append(self._start_sum(told))
            self._report("backward")
            if self._loss_scale:
                scale *= self._loss_scale.value
            return term.value if isinstance(scale, float) and scale == 1.0 else term.value * scale

        self._report("forward")
        self._parallel.run(examples, loss_of)
        loss_sum, own_count, tells = (reduced[0] if reduced else self._start_sum(told))()
        if served:
            self.count = own_count if self._tells_count(told, tells) else self.count
            return loss_sum
        if not self._tells_count(told, tells):
            return loss_sum / total()
        # The loss told its count only after its forward pass: the gradients were divided by another one.
        counted = own_count + (own_count == 0)
        factor = torch.as_tensor(total() / counted, device=self._device) * (own_count != 0)
        for gradients in by_type(local_of(p.grad) for p in self._parallel.module.parameters() if p.grad is not None):
            torch._foreach_mul_(gradients, factor.reshape(()).to(gradients[0].dtype))
        return loss_sum / counted

    def _start_total(self, examples: Examples, global_samples: int | None, served: bool) -> Callable[[], Any]:
        """The global count that the sums are divided by, once it is asked for."""
        if served:  # by one who knows the others' sums and counts, and divides
            own = (self._loss.count(example.target, samples) for example, samples in examples)
            self.count = 0.0 if self._loss.kind == "sum" else sum(own)
            return lambda: 1.0
        if self._loss.kind == "sum":
            return lambda: 1.0
        if self._loss.kind in ("samples", "joined") and global_samples is not None:
            return lambda: global_samples
        count = sum(self._loss.count(example.target, samples) for example, samples in examples)
        if self._parallel.sums is None and not isinstance(count, Tensor):
            return lambda: count
        counts = torch.as_tensor(count, device=self._device).double().reshape(1)
        reduced = self._add_up(counts if self._parallel.place.first else torch.zeros_like(counts))

        @cache
        def total() -> Tensor:
            (found,) = reduced()
            return found + (found == 0)  # no target at all: a gradient of zero, not of 0/0

        return total

    def _tells_count(self, told: list[Tensor], tells: Tensor) -> bool:
        """Whether the loss returns its own count. Reading `tells` waits for the device: only ranks that see no loss do
        so, once, since that is the loss function's way."""
        if told:
            return len(told) > 1
        if self._counts_itself is None:
            self._counts_itself = bool(tells)
        return self._counts_itself

    def _start_sum(self, told: list[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """The loss's sum, its own count and whether it told one, of all ranks together."""
        if not self._parallel.place.speaks:
            return self._add_up(torch.zeros(3, dtype=torch.float64, device=self._device))
        tells = told[0].new_full((), float(len(told) > 1))  # filled on the device: a copy would make the host wait
        if self._parallel.sums is None:
            return lambda: (told[0], told[-1], tells)
        return self._add_up(torch.stack([told[0].double(), told[-1].double(), tells.double()]))

    def _add_up(self, numbers: Tensor) -> Callable[[], Sequence[Tensor]]:
        """Adds a few numbers over all ranks while other work goes on; the result waits for them."""
        if self._parallel.sums is None:
            return numbers.unbind
        summed = self._parallel.sums.start(numbers)
        return lambda: summed().unbind()
