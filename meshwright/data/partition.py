"""Who gets which samples of an epoch: batches, each rank's share of them, and the microbatches of a share.

batch     batch k is places k·b … of one order of all samples; each rank takes an even share of it        ByBatch
sample    the data set lies in fixed parts, each with an order of its own; batch k has an even piece of     ByPart
          every part, so that all parts end together: piece k of part p is share(size of p, k, batches)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from meshwright.data.order import batches_per_epoch, permutation
from meshwright.errors import InputError


def share(count: int, rank: int, ranks: int) -> range:
    """A rank's positions: contiguous, sizes differ by at most one, and rank 0 never goes without."""
    each, extra = divmod(count, ranks)
    start = rank * each + min(rank, extra)
    return range(start, start + each + (rank < extra))


def microbatches(positions: range, accumulation: int) -> list[range]:
    """Cuts into at most `accumulation` pieces of nearly equal size, none of them empty."""
    pieces = min(accumulation, len(positions))
    cuts = [share(len(positions), piece, pieces) for piece in range(pieces)]
    return [positions[cut.start : cut.stop] for cut in cuts]


def parts(shares: Sequence[range], rank: int, accumulation: int) -> list[range]:
    """A rank's microbatches of a batch that is divided so: on every rank as many as the one with the most has.

    Sharded models talk to each other in every forward pass, so a rank with fewer would leave the others
    waiting. Its missing ones are empty ranges at the end, for which the loader borrows a sample.
    """
    own = microbatches(shares[rank], accumulation)
    everyone = max(min(accumulation, len(one)) for one in shares)
    return own + [range(0)] * (everyone - len(own))


class Partition(Protocol):
    @property
    def batches(self) -> int:
        """Of an epoch."""
        ...

    def order(self, epoch: int) -> np.ndarray: ...

    def shares(self, index: int) -> list[range]:
        """Every rank's places in the order, for a batch; one behind the other."""
        ...

    def spare(self, order: np.ndarray, index: int, rank: int) -> int:
        """A sample for a rank that has none of its own in this batch; it gets no weight."""
        ...


@dataclass(frozen=True)
class ByBatch:
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
        whole = range(self.size)[index * self.batch : (index + 1) * self.batch]
        return even_shares(whole, self.ranks)

    def spare(self, order: np.ndarray, index: int, rank: int) -> int:
        return int(order[index * self.batch])


def even_shares(whole: range, ranks: int) -> list[range]:
    cuts = (share(len(whole), rank, ranks) for rank in range(ranks))
    return [whole[cut.start : cut.stop] for cut in cuts]


@dataclass(frozen=True)
class ByPart:
    """`parts` of equal size, one a rank where nothing else is said; a rank never reads another one's samples. The order
    is a function of seed, epoch, sizes and the number of parts, so a run may go on with fewer ranks that have several
    parts each."""

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
                f"train.global_batch is {self.batch}, fewer than the {self.parts} parts of the data set, of which each"
                " batch has something: raise it, or lower data.parts"
            )

    @cached_property
    def batches(self) -> int:
        """The fewest of which none is larger than the global batch."""
        count = -(-self.size // self.batch)
        while sum(-(-len(part) // count) for part in self._parts) > self.batch:
            count += 1
        return count

    @property
    def sizes(self) -> list[int]:
        return [len(part) for part in self._parts]

    @cached_property
    def _parts(self) -> list[range]:
        return even_shares(range(self.size), self.parts)

    def order(self, epoch: int) -> np.ndarray:
        shuffled = [
            permutation(self.seed, epoch, len(part), number) + part.start for number, part in enumerate(self._parts)
        ]
        pieces = [
            own[piece.start : piece.stop]
            for index in range(self.batches)
            for own, piece in zip(shuffled, self._pieces(index), strict=True)
        ]
        return np.concatenate(pieces)

    def shares(self, index: int) -> list[range]:
        # Places of a batch are those of all pieces before it; a part's pieces before it are its first ones.
        begin = sum(piece.start for piece in self._pieces(index))
        ends = np.cumsum([0, *(len(piece) for piece in self._pieces(index))])
        owned = even_shares(range(self.parts), self.ranks)
        return [range(begin + int(ends[own.start]), begin + int(ends[own.stop])) for own in owned]

    def spare(self, order: np.ndarray, index: int, rank: int) -> int:
        return self._parts[even_shares(range(self.parts), self.ranks)[rank].start].start

    def _pieces(self, index: int) -> list[range]:
        return [share(len(part), index, self.batches) for part in self._parts]

    def skew(self, labels: Sequence[int]) -> tuple[float, int]:
        """How far the labels of a part lie from those of all samples (half the sum of the differences of their
        frequencies, beyond what chance does to parts of that size), in the part where that is most; and which."""
        found = np.asarray(labels)
        kinds, counts = np.unique(found, return_counts=True)
        expected = counts / len(found)
        distances = []
        for part in self._parts:
            own = np.searchsorted(kinds, found[part.start : part.stop])
            frequencies = np.bincount(own, minlength=len(kinds)) / max(1, len(part))
            by_chance = np.sqrt(expected * (1 - expected) / max(1, len(part))).sum() / 2
            distances.append(np.abs(frequencies - expected).sum() / 2 - by_chance)
        most = int(np.argmax(distances))
        return max(0.0, float(distances[most])), most
