"""What an export costs: the job's evaluation set before and after."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset, Subset

from meshwright.call import bind
from meshwright.job import Job
from meshwright.launch.world import World
from meshwright.plan import Plan
from meshwright.train.build import build_loading, build_metrics
from meshwright.train.session import Session

ALONE = World(rank=0, local_rank=0, size=1, local_size=1, attempt=0, device=torch.device("cpu"), store=None)


@dataclass(frozen=True)
class Change:
    """Of one metric; None where it was no number."""

    before: float | None
    after: float | None

    @property
    def change(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before

    def to_dict(self) -> dict[str, float | None]:
        return {"before": self.before, "after": self.after, "change": self.change}


def measure(model: nn.Module, job: Job, dataset: Any) -> dict[str, float]:
    """The loss and the job's metrics, as training evaluates them: in one process, in fp32."""
    session = Session(
        model,
        lambda parameters: torch.optim.SGD([torch.zeros(1)]),  # never stepped, and a program has no parameters
        loss=bind(job.loss, "loss") if job.loss else None,
        plan=Plan(),
        world=ALONE,
        target=job.data.target,
    )
    found = session.evaluate(dataset, build_metrics(job), job.train.global_batch, build_loading(job, ALONE.device))
    model.eval()
    assert found is not None
    return found


def changes(before: dict[str, float], after: dict[str, float]) -> dict[str, Change]:
    return {name: Change(_number(before[name]), _number(after[name])) for name in before}


def first(dataset: Any, limit: int | None) -> Any:
    """At most so many samples of a data set."""
    if limit is None:
        return dataset
    if hasattr(dataset, "__getitem__"):
        return Subset(dataset, range(min(limit, len(dataset))))
    return _First(dataset, limit)


class _First(IterableDataset[Any]):
    def __init__(self, stream: Any, limit: int) -> None:
        self._stream = stream
        self._limit = limit

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._stream), self._limit)


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None
