"""The batch that a rank receives, and the options of how it is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Microbatch:
    """The collated data of one microbatch.

    `samples` is the number of samples in it. It is 0 where a short batch leaves nothing for a rank: the data is then
    one sample borrowed from another rank, so that the rank can take part in the step, and must get no weight. `width`
    is the number of features of the whole input where the data holds only this rank's columns of it, otherwise None.
    """

    data: Any
    samples: int
    width: int | None = None


@dataclass(frozen=True)
class Batch:
    """One rank's part of one global batch: at least one microbatch, and the same number of them on every rank."""

    microbatches: tuple[Microbatch, ...]
    samples: int  # in the whole global batch, over all ranks
    epoch: int
    index: int  # of the batch within the epoch
    last: bool  # whether it is the last batch of the epoch


@dataclass(frozen=True)
class LoadingOptions:
    """How batches are loaded. `collate` None means torch's default. `parts` is the number of parts that a data set is
    divided into by `sample`; None means one per rank."""

    workers: int = 0
    pin_memory: bool = False
    collate: Callable[[list[Any]], Any] | None = None
    partition: Literal["batch", "sample", "dimension"] = "batch"
    parts: int | None = None


@dataclass(frozen=True)
class SampleShare:
    """Which part of every global batch a rank receives: the share number `rank` of `ranks` equal shares of the samples.
    Where the ranks of a tensor axis receive the same samples and divide their columns, this rank receives the columns
    number `column_part` of `column_parts`."""

    rank: int = 0
    ranks: int = 1
    column_part: int = 0
    column_parts: int = 1
