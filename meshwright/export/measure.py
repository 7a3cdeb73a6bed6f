"""Measures how an export changes the metrics: evaluates a model on the job's evaluation set, before and after the
export."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset, Subset

from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.train.build import build_loading, build_metrics
from meshwright.train.session import Session
from meshwright.user.call import bind

ONE_PROCESS = World(rank=0, local_rank=0, size=1, local_size=1, attempt=0, device=torch.device("cpu"), store=None)


@dataclass(frozen=True)
class MetricChange:
    """The value of one metric before and after the export. A value that is not finite is None."""

    before: float | None
    after: float | None

    @property
    def change(self) -> float | None:
        """`after` minus `before`; None if either value is None."""
        return None if self.before is None or self.after is None else self.after - self.before

    def to_dict(self) -> dict[str, float | None]:
        return {"before": self.before, "after": self.after, "change": self.change}


def measure(model: nn.Module, job: Job, dataset: Any) -> dict[str, float]:
    """Returns the loss and the job's metrics on a data set, by name. They are evaluated as in training, in one process
    and in fp32."""
    session = Session(
        model,
        lambda parameters: torch.optim.SGD([torch.zeros(1)]),  # never stepped; an exported program has no parameters
        loss=bind(job.loss, "loss") if job.loss else None,
        plan=Plan(),
        world=ONE_PROCESS,
        target=job.data.target,
    )
    loading = build_loading(job, ONE_PROCESS.device)
    values = session.evaluate(dataset, build_metrics(job), job.train.global_batch, loading)
    model.eval()
    assert values is not None, "nothing interrupts this evaluation"
    return values


def metric_changes(before: dict[str, float], after: dict[str, float]) -> dict[str, MetricChange]:
    return {name: MetricChange(_finite_or_none(before[name]), _finite_or_none(after[name])) for name in before}


def first_samples(dataset: Any, limit: int | None) -> Any:
    """Returns a data set of the first `limit` samples of `dataset`, or `dataset` itself if `limit` is None."""
    if limit is None:
        return dataset
    if hasattr(dataset, "__getitem__"):
        return Subset(dataset, range(min(limit, len(dataset))))
    return _FirstSamples(dataset, limit)


class _FirstSamples(IterableDataset[Any]):
    """A stream of the first `limit` samples of another stream."""

    def __init__(self, stream: Any, limit: int) -> None:
        self._stream = stream
        self._limit = limit

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._stream), self._limit)


def _finite_or_none(value: float) -> float | None:
    """The value, or None when it is NaN or infinite, which JSON cannot express."""
    return value if math.isfinite(value) else None
