"""Which samples of an epoch form each global batch, which share of it each rank gets, and how shares are cut into
microbatches.

batch     BatchPartition: batch k is the positions [kb, (k+1)b) of one order of all samples, and each rank gets an even
          share of it
sample    PartPartition: the data set is divided into fixed parts, each with its own order, and batch k has an even
          slice of every part, so that all parts end together: slice k of part p is even_share(size of p, k, batches)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from meshwright.data.order import batches_per_epoch, permutation
from meshwright.errors import InputError


def even_share(count: int, rank: int, ranks: int) -> range:
    """The positions of one rank among `count`: contiguous, with sizes that differ by at most one between ranks. Rank 0
    always has one where `count` is not 0."""
    smallest, remainder = divmod(count, ranks)
    start = rank * smallest + min(rank, remainder)
    return range(start, start + smallest + (rank < remainder))


def even_shares(positions: range, ranks: int) -> list[range]:
    """The positions of every rank, in the order of ranks."""
    shares = (even_share(len(positions), rank, ranks) for rank in range(ranks))
    return [positions[share.start : share.stop] for share in shares]


def microbatches(positions: range, accumulation: int) -> list[range]:
    """Cuts positions into at most `accumulation` microbatches of nearly equal size, none of them empty."""
    return even_shares(positions, min(accumulation, len(positions)))


def padded_microbatches(shares: Sequence[range], rank: int, accumulation: int) -> list[range]:
    """A rank's microbatches of a global batch that is divided into these shares, as many as the rank with the most has.

    Ranks of a sharded model communicate in every forward pass, so a rank with fewer microbatches would leave the others
    waiting. The missing ones are empty ranges at the end, for which the loader borrows a sample.
    """
    local = microbatches(shares[rank], accumulation)
    count = max(min(accumulation, len(share)) for share in shares)
    return local + [range(0)] * (count - len(local))


class Partition(Protocol):
    """How the samples of an epoch are divided into global batches and ranks."""

    @property
    def batches(self) -> int:
        """The number of global batches in an epoch."""
        ...

    def order(self, epoch: int) -> np.ndarray:
        """The indices of all samples in the order in which batches take them."""
        ...

    def shares(self, index: int) -> list[range]:
        """For one global batch, the positions in the order that each rank gets; they follow one another."""
        ...

    def borrowed_sample(self, order: np.ndarray, index: int, rank: int) -> int:
        """The index of a sample for a rank that has no sample of this batch; it gets no weight."""
        ...


@dataclass(frozen=True)
class BatchPartition:
    """Divides one order of all samples into batches, and each batch evenly among ranks."""

    size: int
    batch: int
    ranks: int
    seed: int
    drop_last: bool = False

    @property
    def batches(self) -> int:
        return batches_per_epoch(self.size, self.batch, self.drop_last)

    def order(self, epoch: int) -> np.ndarray:
        return permutation(self.seed, epoch, self.size)

    def shares(self, index: int) -> list[range]:
        batch = range(self.size)[index * self.batch : (index + 1) * self.batch]
        return even_shares(batch, self.ranks)

    def borrowed_sample(self, order: np.ndarray, index: int, rank: int) -> int:
        return int(order[index * self.batch])


@dataclass(frozen=True)
class PartPartition:
    """Divides the data set into `parts` of equal size, and the parts evenly among ranks, so that a rank never reads
    samples of another one. The order is a function of seed, epoch, sizes and the number of parts, so a run may be
    resumed on fewer ranks that have several parts each."""

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
        """The smallest number of batches of which none is larger than the global batch."""
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

    def shares(self, index: int) -> list[range]:
        slices = self._slices(index)
        # The order begins with the slices of all earlier batches, and a slice begins after those of its part.
        begin = sum(positions.start for positions in slices)
        ends = np.cumsum([0, *(len(positions) for positions in slices)])
        parts_of_ranks = even_shares(range(self.parts), self.ranks)
        return [range(begin + int(ends[parts.start]), begin + int(ends[parts.stop])) for parts in parts_of_ranks]

    def borrowed_sample(self, order: np.ndarray, index: int, rank: int) -> int:
        first_part = even_shares(range(self.parts), self.ranks)[rank].start
        return self._parts[first_part].start

    def _slices(self, index: int) -> list[range]:
        """For one global batch, the positions that it takes of each part's order."""
        return [even_share(len(part), index, self.batches) for part in self._parts]

    def skew(self, labels: Sequence[int]) -> tuple[float, int]:
        """How far the labels of a part are from those of all samples, in the part where that is most, and the number of
        that part. The distance is half the sum of the absolute differences of label frequencies, less the distance
        that chance alone gives to parts of that size."""
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
