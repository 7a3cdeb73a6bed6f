"""`ForwardBackward`: the forward and backward passes of a step, such that the gradient is the mean over the global
batch.

    gradient = 1 / data ranks · Σ over data ranks of (data ranks / count · gradient of the rank's loss sum)
    loss     = Σ loss sums / count,   count = Σ of the ranks' counts

The factor in the first sum is applied here, to the loss before its backward pass; the mean over data ranks is taken by
the parallel model when it combines gradients.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.clip import group_by_dtype_and_device
from meshwright.parallel.model import Examples, ParallelModel
from meshwright.parallel.weights.layout import local_tensor
from meshwright.train.step.loss import Loss
from meshwright.train.step.loss_scale import LossScale
from meshwright.train.torch_private import foreach_mul_


class ForwardBackward:
    """Runs the forward and backward passes of a step. `count` is what a remote optimizer divides the last step's sums
    by: the number of targets on this rank, or 0 for a sum that is not divided."""

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
        self._returns_count: bool | None = None  # known after the first step, on ranks that compute no loss
        self.count: Tensor | float = 0.0

    def __call__(self, examples: Examples, global_samples: int | None, *, divide: bool = True) -> Tensor:
        """Leaves the mean gradient over the global batch in the parameters, and returns the mean loss. Unless `divide`,
        it leaves the gradient of the sum over this rank's samples, sets `count`, and returns the sum of the loss.

        The count is known beforehand, or summed over ranks during the forward pass. The sum of the loss is reduced
        during the backward pass. Of ranks that have the same samples, one contributes to these sums.
        """
        ranks = self._plan.data_ranks
        total = self._start_total(examples, global_samples, divide)
        sums: list[Tensor] = []  # the sum of the loss and, if it returns one, of its count
        reductions: list[Callable[[], Sequence[Tensor]]] = []

        def may_reduce_now(number: int) -> bool:
            """Whether to reduce the sums after this microbatch, during its backward pass. Pipeline stages reduce after
            the step, since they communicate throughout it."""
            return number == len(examples) - 1 and self._plan.axes.pipeline == 1

        def loss_of(number: int, output: Any) -> Tensor:
            example, samples = examples[number]
            term = self._loss.term(output, example.target, samples)
            terms = [term.sum] if term.returned_count is None else [term.sum, term.returned_count]
            sums[:] = [earlier + added for earlier, added in zip(sums, terms, strict=True)] if sums else terms
            scale = term.weight * ranks / total()
            if may_reduce_now(number):
                reductions.append(self._start_reducing(sums))
            self._report("backward")
            if self._loss_scale:
                scale *= self._loss_scale.value
            return term.value if isinstance(scale, float) and scale == 1.0 else term.value * scale

        self._report("forward")
        self._parallel.run_microbatches(examples, loss_of)
        loss_sum, count_sum, has_count = (reductions[0] if reductions else self._start_reducing(sums))()
        returns_count = self._check_returns_count(sums, has_count)
        if not divide:
            self.count = count_sum if returns_count else self.count
            return loss_sum
        if not returns_count:
            return loss_sum / total()
        return loss_sum / self._rescale_gradients(total(), count_sum)

    def _rescale_gradients(self, assumed: Any, count: Tensor) -> Tensor:
        """Multiplies the gradients by `assumed` / `count`, for a loss that returns its count after the forward pass,
        when the gradients are divided by an assumed one already. Returns the count, or 1 when it is 0."""
        divisor = count + (count == 0)
        factor = torch.as_tensor(assumed / divisor, device=self._device) * (count != 0)
        parameters = self._parallel.module.parameters()
        for gradients in group_by_dtype_and_device(local_tensor(p.grad) for p in parameters if p.grad is not None):
            foreach_mul_(gradients, factor.reshape(()).to(gradients[0].dtype))
        return divisor

    def _start_total(self, examples: Examples, global_samples: int | None, divide: bool) -> Callable[[], Any]:
        """Starts summing the global count that the sums are divided by, and returns a function that waits for it."""
        if not divide:
            counts = (self._loss.count(example.target, samples) for example, samples in examples)
            self.count = 0.0 if self._loss.kind == "sum" else sum(counts)
            return lambda: 1.0
        if self._loss.kind == "sum":
            return lambda: 1.0
        if self._loss.kind in ("samples", "compares_samples") and global_samples is not None:
            return lambda: global_samples
        count = sum(self._loss.count(example.target, samples) for example, samples in examples)
        if self._parallel.sums is None and not isinstance(count, Tensor):
            return lambda: count
        local = torch.as_tensor(count, device=self._device).double().reshape(1)
        contributes = self._parallel.position.first_of_data_rank
        reduction = self._sum_over_ranks(local if contributes else torch.zeros_like(local))

        @cache
        def total() -> Tensor:
            (value,) = reduction()
            return value + (value == 0)  # without any target the gradient is 0, not 0/0

        return total

    def _check_returns_count(self, sums: list[Tensor], has_count: Tensor) -> bool:
        """Whether the loss returns its count. Reading `has_count` waits for the device, so only ranks that compute no
        loss read it, and only once, since it is the same in every step."""
        if sums:
            return len(sums) > 1
        if self._returns_count is None:
            self._returns_count = bool(has_count)
        return self._returns_count

    def _start_reducing(self, sums: list[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Starts summing the loss and its count over all ranks. The function that is returned waits for both, and for
        whether the loss returns a count."""
        if not self._parallel.position.reports_loss:
            return self._sum_over_ranks(torch.zeros(3, dtype=torch.float64, device=self._device))
        has_count = sums[0].new_full((), float(len(sums) > 1))  # filled on the device: a copy would make the host wait
        if self._parallel.sums is None:
            return lambda: (sums[0], sums[-1], has_count)
        return self._sum_over_ranks(torch.stack([sums[0].double(), sums[-1].double(), has_count.double()]))

    def _sum_over_ranks(self, numbers: Tensor) -> Callable[[], Sequence[Tensor]]:
        """Starts summing a few numbers over all ranks; the function that is returned waits for the result."""
        if self._parallel.sums is None:
            return numbers.unbind
        reduction = self._parallel.sums.start(numbers)
        return lambda: reduction().unbind()
