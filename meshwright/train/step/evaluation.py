"""Evaluation over several ranks: which batches each rank runs, and how their totals are combined."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.data.loading import LoadingOptions, Microbatch, SampleShare, eval_batches
from meshwright.errors import InputError
from meshwright.messages.exchange import all_gather_values
from meshwright.model_io.batch import ModelBatch
from meshwright.parallel.gather_samples import GatherSamples
from meshwright.parallel.model import ParallelModel
from meshwright.train.loss.loss import Loss, over_all_ranks
from meshwright.train.metrics import Metric, MetricTotals, compares_samples


class EvaluationBatches:
    """Iterates over the evaluation batches of one rank, as `eval_batches` yields them, until they end or `interrupted`
    returns True. In the latter case, `gave_up` is True afterwards.

    With `same_count` every rank runs as many batches as the rank that has the most, because the ranks communicate in
    every batch. A rank that has no more batches repeats its last one with weight 0 (`samples` is 0); a rank that never
    had one takes the first batch of rank 0, which it loads itself. An interruption of any rank then stops all ranks.
    """

    def __init__(
        self,
        dataset: Any,
        batch: int,
        share: SampleShare,
        loading: LoadingOptions,
        interrupted: Callable[[], bool],
        same_count: bool,
    ) -> None:
        self._local = eval_batches(dataset, batch=batch, share=share, loading=loading)
        # Rank 0 has a batch whenever any rank has. One batch is loaded without starting worker processes for it.
        first_share, alone = replace(share, rank=0), replace(loading, workers=0)
        self._batches_of_rank_0 = partial(eval_batches, dataset, batch=batch, share=first_share, loading=alone)
        self._interrupted = interrupted
        self._same_count = same_count
        self.gave_up = False

    def __iter__(self) -> Iterator[Microbatch]:
        filler: Microbatch | None = None
        while True:
            batch = next(self._local, None)
            any_has_batch, self.gave_up = self._agree(batch is not None)
            if self.gave_up or not any_has_batch:
                return
            if batch is None:
                filler = filler or replace(next(self._batches_of_rank_0()), samples=0)
                yield filler
            else:
                yield batch
                filler = replace(batch, samples=0)

    def _agree(self, has_batch: bool) -> tuple[bool, bool]:
        """Returns two flags: whether any rank has a batch, and whether any is interrupted. Without `same_count` the
        ranks do not communicate, and the flags are those of this rank."""
        stop = self._interrupted()
        if not self._same_count:
            return has_batch, stop
        flags = torch.tensor([has_batch, stop], dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        has_batch, stop = (bool(flag) for flag in flags.tolist())
        return has_batch, stop


class Evaluator:
    """Evaluates a model on data sets. `make_example` turns a batch, and the width of its input or None, into the
    model's arguments and the target. `gather_samples` is None if there is only one data rank."""

    def __init__(
        self,
        parallel: ParallelModel,
        loss: Loss,
        gather_samples: GatherSamples | None,
        make_example: Callable[[Any, int | None], ModelBatch],
        ranks: int,
    ) -> None:
        self._parallel = parallel
        self.loss = loss
        self._gather_samples = gather_samples
        self._make_example = make_example
        self._ranks = ranks

    def totals(
        self,
        dataset: Any,
        metrics: Mapping[str, Metric],
        batch: int,
        share: SampleShare,
        loading: LoadingOptions,
        interrupted: Callable[[], bool],
    ) -> tuple[MetricTotals, bool]:
        """Evaluates one share of the data set. Returns its totals, which are not combined with those of other ranks,
        and whether the evaluation was interrupted. Leaves the model in evaluation mode."""
        self._parallel.align_buffers()
        self._parallel.train(False)
        any_compares = self.loss.kind == "compares_samples" or any(map(compares_samples, metrics.values()))
        metrics = {name: over_all_ranks(metric, self._gather_samples) for name, metric in metrics.items()}
        totals = MetricTotals(metrics, self._parallel.device)
        same_count = (
            self._parallel.needs_equal_batch_counts or share.ranks < self._ranks or (any_compares and self._ranks > 1)
        )
        batches = EvaluationBatches(dataset, max(1, batch // share.ranks), share, loading, interrupted, same_count)
        with torch.no_grad():  # not inference_mode, whose tensors training could not use if the model caches one
            for part in batches:
                example = self._make_example(part.data, part.width)
                with self.loss.forward_context(True):
                    output = self._parallel.evaluate(example)
                if not self._parallel.position.reports_loss or not (part.samples or any_compares):
                    continue
                if self.loss.is_in(output):
                    loss = self.loss.sum_and_count(output, example.target, part.samples)
                    totals.add_value("loss", loss, part.samples)
                elif not metrics:
                    raise InputError(
                        f"the model returned {type(output).__name__} without a loss in evaluation mode, and there is no"
                        " metric: name one in metrics, or leave data.eval out"
                    )
                totals.add(output, example.target, part.samples)
        self._parallel.reshard()  # otherwise weights that the user changes would not be used by the next evaluation
        return totals, batches.gave_up


def combine_totals(local: MetricTotals, gave_up: bool, ranks: int) -> dict[str, float] | None:
    """Returns the metrics by name over all ranks; None if any rank gave up. Names are sent with the totals, because a
    rank that evaluated nothing does not know the names of the metrics."""
    if ranks == 1:
        return None if gave_up else local.finish(local.totals())
    of_ranks = all_gather_values((gave_up, local.totals()))
    if any(rank_gave_up for rank_gave_up, _ in of_ranks):
        return None
    totals: dict[str, Tensor] = {}
    for _, rank_totals in of_ranks:
        for name, total in rank_totals.items():
            totals[name] = totals[name] + total if name in totals else total
    return local.finish(totals)
