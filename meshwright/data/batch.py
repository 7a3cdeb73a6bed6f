"""The batch that a rank receives, and the options of how it is loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from meshwright.data.partition import divide
from meshwright.data.sampling import WeightedSampling
from meshwright.data.share_table import ShareTable

Items = TypeVar("Items", list[Any], range)


@dataclass(frozen=True)
class Microbatch:
    """The collated data of one microbatch.

    `samples` is the number of samples that count. It is 0 if a short batch leaves no sample for this rank. The data is
    then one sample borrowed from elsewhere in the data set, with which the rank can take part in the step; it must get
    no weight. `width` is the number of features of the whole input if the data holds only this rank's columns of the
    input, otherwise None.
    """

    data: Any
    samples: int
    width: int | None = None


@dataclass(frozen=True)
class StreamState:
    """Where a stream was before it gave a global batch, for a run that is resumed after this batch. `before` is what
    the stream's `state_dict` returned, and `digest` a digest of the batch: if the stream gives the same batch again,
    `before` was right, and the next sample is the one that the resumed run needs."""

    before: dict[str, Any]
    digest: str


@dataclass(frozen=True)
class Batch:
    """One rank's part of one global batch: at least one microbatch, and the same number of them on every rank.
    `stream` is None unless the samples come from a stream that has `state_dict`."""

    microbatches: tuple[Microbatch, ...]
    samples: int  # in the whole global batch, over all ranks
    epoch: int
    index: int  # of the batch within the epoch
    last: bool  # whether it is the last batch of the epoch
    stream: StreamState | None = None


@dataclass(frozen=True)
class LoadingOptions:
    """How batches are loaded. If `collate` is None, torch's default is used. `parts` is the number of parts into which
    a data set is divided if `partition` is `sample`; None means one part per rank. `start_worker` is called with its
    number in each worker process, and `loader_options` are further arguments of torch's `DataLoader`. `sampling` says
    how an epoch of training draws its samples; None means each sample once. `timeout_s` is how long a worker may take
    for a batch; None means that there is no limit. With `whole_batches`, a rank collates the samples of all ranks and
    takes its rows (collate/dependence.py); sessions set it where it is needed."""

    workers: int = 0
    pin_memory: bool = False
    collate: Callable[[list[Any]], Any] | None = None
    partition: Literal["batch", "sample", "dimension"] = "batch"
    parts: int | None = None
    sampling: WeightedSampling | None = None
    start_worker: Callable[[int], None] | None = None
    loader_options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    whole_batches: bool = False


@dataclass(frozen=True)
class SampleShare:
    """Which part of every global batch a rank receives: share number `rank` of `ranks` shares of the samples. They are
    equal, or in the proportions of `samples`. With `changes`, the proportions depend on the number of the batch, and
    the first batch that is loaded has the number `first`.

    If the ranks of a tensor axis receive the same samples and divide the columns of the input among them, this rank
    receives part number `column_part` of `column_parts` of the columns."""

    rank: int = 0
    ranks: int = 1
    column_part: int = 0
    column_parts: int = 1
    samples: tuple[int, ...] = ()
    changes: ShareTable | None = field(default=None, compare=False)
    first: int = 0

    def proportions(self, batch: int) -> tuple[int, ...]:
        """The proportions in which the ranks divide the batch that is loaded as number `batch`, counted from 0; empty
        for even shares."""
        return self.samples if self.changes is None else self.changes.at(self.first + batch)

    def divide(self, positions: range, batch: int) -> list[range]:
        """Returns the positions of every rank in the batch that is loaded as number `batch`."""
        return divide(positions, self.ranks, self.proportions(batch))

    def take(self, batch: Items, number: int = 0) -> tuple[Items, list[int]]:
        """Returns this rank's part of a batch that is loaded as this number, and how many samples each rank has. A rank
        without any gets the first one of the batch, which must have no weight."""
        shares = self.divide(range(len(batch)), number)
        own = shares[self.rank]
        return batch[own.start : own.stop] or batch[:1], [len(positions) for positions in shares]

    @property
    def even(self) -> "SampleShare":
        """The same share of samples that are divided evenly, as in evaluations."""
        return replace(self, samples=(), changes=None)
