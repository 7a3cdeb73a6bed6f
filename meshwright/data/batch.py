"""What a rank is handed, and the few choices of how it is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Microbatch:
    """`samples` is 0 where the data is one borrowed sample: a rank without a share of a short batch takes
    part with it, and must give it no weight. `width` is that of the whole input, where the data holds only this rank's
    columns of it."""

    data: Any
    samples: int
    width: int | None = None


@dataclass(frozen=True)
class Batch:
    """One rank's part of one global batch: at least one microbatch, and equally many on every rank."""

    parts: tuple[Microbatch, ...]
    samples: int  # of the whole global batch, all ranks
    epoch: int
    index: int  # of the batch within the epoch
    last: bool  # of the epoch


@dataclass(frozen=True)
class Loading:
    workers: int = 0
    pin_memory: bool = False
    collate: Callable[[list[Any]], Any] | None = None  # null: torch's default
    partition: Literal["batch", "sample", "dimension"] = "batch"
    parts: int | None = None  # of the data set, divided by sample; null: one a rank


@dataclass(frozen=True)
class Share:
    """`part` of `parts` is the place among the ranks that have the same samples, which divide columns."""

    rank: int = 0
    ranks: int = 1
    part: int = 0
    parts: int = 1
