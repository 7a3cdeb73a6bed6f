"""`Reducer`: what training wants of a collective, whatever its algorithm."""

from typing import Protocol

from torch import Tensor


class Reducer(Protocol):
    """Averages flat tensors over a group of ranks, in place, while other work goes on. Every rank of the group starts
    the same buckets in the same order. A rank that dies or stays away makes the others raise `CollectiveError` within
    the group's timeout."""

    def start(self, flat: Tensor, bucket: int) -> None:
        """Begins bucket number `bucket` of a step; returns as early as it can."""

    def finish(self) -> None:
        """Returns once all that was started is done: every rank's tensors hold the mean, the same bits on each."""

    def close(self) -> None:
        """Gives back what is held: memory, threads."""
