"""`Reducer`: the interface through which training averages gradients, for every algorithm."""

from typing import Protocol

from torch import Tensor


class Reducer(Protocol):
    """Averages flat tensors over a group of ranks, in place, while other work continues. Every rank of the group starts
    the same buckets in the same order. When a rank dies or does not call, the others raise `CollectiveError` within the
    timeout of the group."""

    def start(self, flat: Tensor, bucket: int) -> None:
        """Starts to average bucket number `bucket` of a step, and returns without waiting for the result."""

    def finish(self) -> None:
        """Waits until all buckets that were started are averaged. Every rank then has the same bits."""

    def close(self) -> None:
        """Releases memory and threads."""
