"""Which samples of an epoch form each global batch, which share of a batch each rank gets, and how shares are cut into
microbatches. The job's `data.partition` chooses between two ways:

batch     `BatchPartition`: all samples are put in one order. Batch k is the positions [kb, (k+1)b) of this order, and
          each rank gets an even share of the batch, or one in the proportions of a plan's `shares.samples`.
sample    `PartPartition`: the data set is divided into fixed parts, each with its own order. Batch k takes an even
          slice of every part, so all parts end together: slice k of part p is even_share(size of p, k, batches).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np

from meshwright.data.order import batches_per_epoch, permutation
from meshwright.data.sampling import WeightedSampling
from meshwright.errors import InputError
from meshwright.plan_fields.shares import share_sizes


def even_share(count: int, rank: int, ranks: int) -> range:
    """Returns the positions that one rank gets of `count` positions. They are contiguous, and the ranks' numbers of
    positions differ by at most one. Rank 0 always gets a position, unless `count` is 0."""
    smallest, remainder = divmod(count, ranks)
    start = rank * smallest + min(rank, remainder)
    return range(start, start + smallest + (rank < remainder))


def even_shares(positions: range, ranks: int) -> list[range]:
    """Divides positions evenly. Returns those of every rank, in the order of ranks."""
    shares = (even_share(len(positions), rank, ranks) for rank in range(ranks))
    return [positions[share.start : share.stop] for share in shares]


def proportional_shares(positions: range, samples: Sequence[int]) -> list[range]:
    """Divides positions in the proportions of `samples`. Returns those of every rank, in the order of ranks. In a
    short batch, a rank may get none."""
    ends = np.cumsum([0, *share_sizes(len(positions), samples)]).tolist()
    return [positions[start:stop] for start, stop in pairwise(ends)]


def divide(positions: range, ranks: int, samples: Sequence[int]) -> list[range]:
    """Divides positions in the proportions of `samples`, or evenly if it is empty."""
    return proportional_shares(positions, samples) if samples else even_shares(positions, ranks)


def microbatches(positions: range, accumulation: int) -> list[range]:
    """Cuts positions into at most `accumulation` microbatches of nearly equal size, none of them empty."""
    return even_shares(positions, min(accumulation, len(positions)))


def padded_microbatches(shares: Sequence[range], rank: int, accumulation: int) -> list[range]:
    """Returns a rank's microbatches of a global batch that is divided into these shares. All ranks get the same number
    of microbatches: as many as the rank with the most samples needs.

    Ranks of a sharded model communicate in every forward pass, so a rank with fewer microbatches would leave the other
    ranks waiting. Missing microbatches are empty ranges at the end, for which the loader borrows a sample.
    """
    local = microbatches(shares[rank], accumulation)
    count = max(min(accumulation, len(share)) for share in shares)
    return local + [range(0)] * (count - len(local))


class Partition(Protocol):
    """How the samples of an epoch are divided into global batches, and each global batch among ranks."""

    @property
    def batches(self) -> int:
        """The number of global batches in an epoch."""
        ...

    def order(self, epoch: int) -> np.ndarray:
        """Returns the indices of all samples, in the order in which batches take them."""
        ...

    def shares(self, index: int, samples: Sequence[int] = ()) -> list[range]:
        """Returns, for global batch number `index`, the positions in `order` that each rank gets: even shares, or
        shares in the proportions of `samples`. The ranges of the ranks follow one another."""
        ...

    def borrowed_sample(self, order: np.ndarray, index: int, rank: int, samples: Sequence[int] = ()) -> int:
        """Returns the index of a sample for a rank that has no sample of this batch. The sample gets no weight."""
        ...


@dataclass(frozen=True)
class BatchPartition:
    """Divides one order of all samples into batches, and each batch among ranks. With `sampling`, the order is
    what it draws, and `size` the number of its draws."""

    size: int
    batch: int
    ranks: int
    seed: int
    drop_last: bool = False
    sampling: WeightedSampling | None = None

    @property
    def batches(self) -> int:
        return batches_per_epoch(self.size, self.batch, self.drop_last)

    def order(self, epoch: int) -> np.ndarray:
        return self.sampling.order(self.seed, epoch) if self.sampling else permutation(self.seed, epoch, self.size)

    def shares(self, index: int, samples: Sequence[int] = ()) -> list[range]:
        batch = range(self.size)[index * self.batch : (index + 1) * self.batch]
        return divide(batch, self.ranks, samples)

    def borrowed_sample(self, order: np.ndarray, index: int, rank: int, samples: Sequence[int] = ()) -> int:
        return int(order[index * self.batch])


@dataclass(frozen=True)
class PartPartition:
    """Divides the data set into `parts` parts of nearly equal size, and the parts among ranks. A rank reads
    samples of its own parts only. The order is a function of seed, epoch, sizes and the number of parts, so a run may
    be resumed on fewer ranks, each of which then has several parts."""

    size: int
    batch: int
    ranks: int
    seed: int
    parts: int

    def __post_init__(self) -> None:
        if not self.ranks <= self.parts <= self.size:
            raise InputError(
                f"data.parts is {self.parts}, but {self.ranks} ranks share {self.size} samples: choose from as many"
                " parts as ranks to as many as samples"
            )
        if self.batch < self.parts:
            raise InputError(
                f"train.global_batch is {self.batch}, fewer than the {self.parts} parts of the data set, but each batch"
                " needs a sample of every part: raise it, or lower data.parts"
            )

    @cached_property
    def batches(self) -> int:
        """The smallest number of batches for which no batch is larger than the global batch."""
        count = -(-self.size // self.batch)
        while sum(-(-len(part) // count) for part in self._parts) > self.batch:
            count += 1
        return count

    @property
    def sizes(self) -> list[int]:
        """The number of samples in each part."""
        return [len(part) for part in self._parts]

    @cached_property
    def _parts(self) -> list[range]:
        return even_shares(range(self.size), self.parts)

    def order(self, epoch: int) -> np.ndarray:
        orders = [
            permutation(self.seed, epoch, len(part), number) + part.start for number, part in enumerate(self._parts)
        ]
        slices = [
            order[positions.start : positions.stop]
            for index in range(self.batches)
            for order, positions in zip(orders, self._slices(index), strict=True)
        ]
        return np.concatenate(slices)

    def shares(self, index: int, samples: Sequence[int] = ()) -> list[range]:
        slices = self._slices(index)
        # The order begins with the slices of all earlier batches. A slice's start is the number of samples that earlier
        # batches take of its part.
        begin = sum(positions.start for positions in slices)
        ends = np.cumsum([0, *(len(positions) for positions in slices)])
        parts_of_ranks = self._parts_of_ranks(samples)
        return [range(begin + int(ends[parts.start]), begin + int(ends[parts.stop])) for parts in parts_of_ranks]

    def borrowed_sample(self, order: np.ndarray, index: int, rank: int, samples: Sequence[int] = ()) -> int:
        return self._parts[self._parts_of_ranks(samples)[rank].start].start

    def _parts_of_ranks(self, samples: Sequence[int]) -> list[range]:
        return divide(range(self.parts), self.ranks, samples)

    def _slices(self, index: int) -> list[range]:
        """Returns, for global batch number `index`, the positions that the batch takes of each part's order."""
        return [even_share(len(part), index, self.batches) for part in self._parts]

    def skew(self, labels: Sequence[int]) -> tuple[float, int]:
        """Returns how far the labels of the most skewed part are from those of all samples (at least 0), and the number
        of that part. The distance is half the sum of the absolute differences of label frequencies, minus the distance
        that chance alone causes in parts of that size."""
        all_labels = np.asarray(labels)
        classes, counts = np.unique(all_labels, return_counts=True)
        expected = counts / len(all_labels)
        distances = []
        for part in self._parts:
            class_numbers = np.searchsorted(classes, all_labels[part.start : part.stop])
            frequencies = np.bincount(class_numbers, minlength=len(classes)) / max(1, len(part))
            by_chance = np.sqrt(expected * (1 - expected) / max(1, len(part))).sum() / 2
            distances.append(np.abs(frequencies - expected).sum() / 2 - by_chance)
        most_skewed = int(np.argmax(distances))
        return max(0.0, float(distances[most_skewed])), most_skewed
