"""`ForwardBackward`: the forward and backward passes of a step, such that the gradient is the mean over the global
batch.

    gradient = 1 / data ranks · Σ over data ranks of (data ranks / count · gradient of the rank's loss sum)
    loss     = Σ loss sums / count,   count = Σ of the ranks' counts

A rank's count is the number of targets (or samples) that its loss sum is a sum over. The factor `data ranks / count` is
applied here, to the loss before its backward pass. The mean over data ranks is taken by the parallel model when it
averages gradients.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshwright.blocks.failed_module import where_it_failed
from meshwright.parallel.clip import group_by_dtype_and_device
from meshwright.parallel.compiled import is_compile_error
from meshwright.parallel.model import Examples, ParallelModel
from meshwright.parallel.weights.layout import local_tensor
from meshwright.train.loop_checks.divided_values import explain_divided
from meshwright.train.loss.loss import Loss
from meshwright.train.step.batch import tensors_in
from meshwright.train.step.graphs.step_state import StepState
from meshwright.train.step.loss_scale import LossScale
from meshwright.train.torch_private import foreach_mul_


def _shapes(examples: Examples) -> tuple[torch.Size, ...]:
    """The shapes of all tensors of the microbatches that have samples."""
    parts = ((e.arguments, e.keywords, e.target) for e, samples in examples if samples)
    return tuple(tensor.shape for part in parts for tensor in tensors_in(part))


class ForwardBackward:
    """Runs the forward and backward passes of a step. `count` is set by calls without `divide`: the number of targets
    or samples of this rank in the last step, or 0 for a loss that is a sum and is not divided."""

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
        self.loss = loss
        self._loss_scale = loss_scale
        self._report = report
        self._returns_count: bool | None = None  # learned in the first step; only for ranks that compute no loss
        self.count: Tensor | float = 0.0

    def __call__(
        self, examples: Examples, global_samples: int | None, *, divide: bool = True, falls_back: bool = True
    ) -> Tensor:
        """Leaves the mean gradient over the global batch in the parameters, and returns the mean loss. Without
        `divide`, it leaves the gradient of the sum over this rank's samples, sets `count`, and returns the sum of the
        loss.

        The count is known before the forward pass, or summed over ranks during it. The sum of the loss is reduced over
        ranks during the backward pass. Among ranks that have the same samples, only one contributes to these two sums.

        If the compiler fails, the step runs again from where it began, with less that is compiled; without
        `falls_back`, the error is raised.
        """
        compilation = self._parallel.compilation
        shapes = _shapes(examples) if compilation.is_on else ()
        while True:
            state = StepState(self._parallel.module, self._device) if compilation.may_compile(shapes) else None
            try:
                loss = self._run(examples, global_samples, divide)
            except Exception as error:
                if not falls_back or not compilation.is_on or not is_compile_error(error):
                    explained = explain_divided(error, self._plan)
                    if explained is None:
                        raise
                    raise explained from error
                compilation.fall_back(error, where_it_failed(error, self._parallel.module))
            else:
                if compilation.is_on:
                    compilation.check_step(shapes)
                return loss
            if state is not None:
                state.restore()
            for parameter in self._parallel.module.parameters():
                parameter.grad = None

    def _run(self, examples: Examples, global_samples: int | None, divide: bool) -> Tensor:
        is_alone = self._plan.world_size == 1 and self._plan.microbatches == 1 and divide
        has_global_batch = is_alone and self.loss.kind != "compares_samples"
        return self._run_alone(examples) if has_global_batch else self._run_share(examples, global_samples, divide)

    def _run_alone(self, examples: Examples) -> Tensor:
        """The step of a rank whose only microbatch is the whole global batch."""
        means: list[Tensor] = []

        def loss_of(number: int, mean: Tensor) -> Tensor:
            means.append(self.loss.value_of_mean(mean, examples[number][0].target))
            self._report("backward")
            return mean * self._loss_scale.value if self._loss_scale else mean

        self._report("forward")
        with self.loss.forward_context(True):
            self._parallel.run_microbatches(examples, self.loss.mean, loss_of)
        return means[0]

    def _run_share(self, examples: Examples, global_samples: int | None, divide: bool) -> Tensor:
        ranks = self._plan.data_ranks
        total = self._start_total(examples, global_samples, divide)
        sums: list[Tensor] = []  # the sum of the loss and, if the loss function returns counts, the sum of the counts
        reductions: list[Callable[[], Sequence[Tensor]]] = []
        # The count of a single microbatch that is the whole global batch is known before its backward pass. Hooks and
        # custom functions, which need not be linear, then see the gradients that one device has.
        is_whole = divide and ranks == 1 and len(examples) == 1

        def may_reduce_now(number: int) -> bool:
            """Whether to start reducing the sums before this microbatch's backward pass, to overlap with it. Pipeline
            stages reduce after the step instead, because they communicate throughout it."""
            return number == len(examples) - 1 and self._plan.axes.pipeline == 1

        def loss_of(number: int, result: Any) -> Tensor:
            term = self.loss.term_of(result, examples[number][1])
            terms = [term.sum] if term.returned_count is None else [term.sum, term.returned_count]
            sums[:] = [earlier + added for earlier, added in zip(sums, terms, strict=True)] if sums else terms
            count = term.returned_count if is_whole else None
            scale = term.weight * ranks / (total() if count is None else _nonzero(count).double())
            if may_reduce_now(number):
                reductions.append(self._start_reducing(sums))
            self._report("backward")
            if self._loss_scale:
                scale *= self._loss_scale.value
            return term.value if isinstance(scale, float) and scale == 1.0 else term.value * scale

        self._report("forward")
        with self.loss.forward_context(any(samples for _, samples in examples)):
            self._parallel.run_microbatches(examples, self.loss.evaluate, loss_of)
        loss_sum, count_sum, has_count = (reductions[0] if reductions else self._start_reducing(sums))()
        returns_count = self._check_returns_count(sums, has_count)
        if not divide:
            self.count = count_sum if returns_count else self.count
            return loss_sum
        if not returns_count:
            return loss_sum / total()
        # Ranks of earlier pipeline stages have not seen the count, but their gradients were divided by it, too.
        return loss_sum / self._rescale_gradients(_nonzero(count_sum) if is_whole else total(), count_sum)

    def _rescale_gradients(self, assumed: Any, count: Tensor) -> Tensor:
        """Corrects the gradients of a loss function that returns its count. The count was not known before the backward
        pass, so the gradients were divided by the count `assumed`; they are multiplied by `assumed` / `count`. Returns
        the count, or 1 if the count is 0 (the gradients are 0 then)."""
        divisor = _nonzero(count).double()  # counts may be integers, whose quotients torch computes in fp32
        factor = torch.as_tensor(assumed / divisor, device=self._device) * (count != 0)
        parameters = self._parallel.module.parameters()
        for gradients in group_by_dtype_and_device(local_tensor(p.grad) for p in parameters if p.grad is not None):
            foreach_mul_(gradients, factor.reshape(()).to(gradients[0].dtype))
        return divisor

    def _start_total(self, examples: Examples, global_samples: int | None, divide: bool) -> Callable[[], Any]:
        """Starts summing the count over ranks. Returns a function that waits for the sum and returns it. Without
        `divide`, it sets `self.count` to this rank's count instead, and the returned function returns 1."""
        if not divide:
            counts = (self.loss.count(example.target, samples) for example, samples in examples)
            self.count = sum(counts) if self.loss.is_divided else 0.0
            return lambda: 1.0
        if not self.loss.is_divided:
            return lambda: 1.0
        if self.loss.kind in ("samples", "compares_samples") and global_samples is not None:
            return lambda: global_samples
        count = sum(self.loss.count(example.target, samples) for example, samples in examples)
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
        """Whether the loss function returns counts. Ranks that compute the loss see it from `sums`. Other ranks read
        `has_count`, but only in the first step, because reading it waits for the device and it never changes."""
        if sums:
            return len(sums) > 1
        if self._returns_count is None:
            self._returns_count = bool(has_count)
        return self._returns_count

    def _start_reducing(self, sums: list[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Starts summing the loss and its count over all ranks. Returns a function that waits, and returns both sums
        and a number that is not 0 if the loss function returns counts (otherwise the second sum has no meaning)."""
        if not self._parallel.position.reports_loss:
            return self._sum_over_ranks(torch.zeros(3, dtype=torch.float64, device=self._device))
        has_count = sums[0].new_full((), float(len(sums) > 1))  # filled on the device: a copy would make the host wait
        if self._parallel.sums is None:
            return lambda: (sums[0], sums[-1], has_count)
        return self._sum_over_ranks(torch.stack([sums[0].double(), sums[-1].double(), has_count.double()]))

    def _sum_over_ranks(self, numbers: Tensor) -> Callable[[], Sequence[Tensor]]:
        """Starts summing a few numbers over all ranks. Returns a function that waits for the sums and returns them."""
        if self._parallel.sums is None:
            return numbers.unbind
        reduction = self._parallel.sums.start(numbers)
        return lambda: reduction().unbind()


def _nonzero(count: Tensor) -> Tensor:
    """The count, or 1 in the place of 0: the gradients of a batch without targets are 0, not 0/0."""
    return count + (count == 0)
