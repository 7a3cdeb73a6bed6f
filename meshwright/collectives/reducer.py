"""`Reducer`: the interface through which training averages gradients; each algorithm implements it."""

from typing import Protocol

import torch
from torch import Tensor


class Reducer(Protocol):
    """Averages flat tensors over a group of ranks, in place, while other work continues. Every rank of the group starts
    the same buckets in the same order. If a rank dies, or does not start a bucket that the other ranks have started,
    the other ranks raise `CollectiveError` within the timeout of the group."""

    def start(self, flat: Tensor, bucket: int) -> None:
        """Starts to average `flat`, which is bucket number `bucket` of the step, in place. Returns without waiting for
        the result."""

    @property
    def awaited(self) -> int | None:
        """The first bucket that was started and is not averaged, also after an error; None if there is none. Any thread
        may read it."""

    def finish(self) -> None:
        """Waits until all buckets that were started are averaged. Their results are bitwise equal on all ranks."""

    def close(self) -> None:
        """Releases memory and threads."""


def real_numbers(flat: Tensor) -> Tensor:
    """Returns the memory of a flat tensor as real numbers, which every collective can sum."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
