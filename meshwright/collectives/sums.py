"""A few numbers added up over ranks while other work goes on: losses, counts, which parameters a step has used.

What they cost is waiting, not bytes. A backend's threads are woken for them, beside ranks that keep all cores busy; in
shared memory a rank writes its numbers down, and whoever wants the sum reads those of all.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.collectives.shared_memory.reducer import SharedMemory
from meshwright.collectives.shared_memory.steps import STAGE_UP_TO_BYTES
from meshwright.errors import InputError
from meshwright.plan import Algorithm


class Sums(Protocol):
    def start(self, numbers: Tensor) -> Callable[[], Tensor]:
        """Every rank starts the same sums in the same order, and asks for them at the same places. `numbers` become the
        sum, which the result waits for."""
        ...

    def close(self) -> None: ...


class NativeSums:
    """Through the backend."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, numbers: Tensor) -> Callable[[], Tensor]:
        work = dist.all_reduce(numbers, group=self._group, async_op=True)

        def result() -> Tensor:
            work.wait()
            return numbers

        return result

    def close(self) -> None:
        """Nothing to close: the group is its maker's."""


class SharedSums:
    """Of ranks on one machine. Tensors of fp64 or int64, at most `LARGEST_BYTES` each."""

    LARGEST_BYTES = STAGE_UP_TO_BYTES  # larger ones would have to move into shared memory, each of them anew

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._memory = SharedMemory(group, operation="sum", what="sum")
        self._number = 0

    def start(self, numbers: Tensor) -> Callable[[], Tensor]:
        assert numbers.numel() * numbers.element_size() <= self.LARGEST_BYTES, "few numbers are added up here"
        self._memory.start(numbers, self._number)
        self._number += 1

        def result() -> Tensor:
            self._memory.finish()
            return numbers

        return result

    def close(self) -> None:
        self._memory.close()


def make_sums(algorithm: Algorithm, group: dist.ProcessGroup, device: torch.device) -> NativeSums | SharedSums:
    """All ranks of the group ask together. They go the way that the gradients go, where that is shared memory."""
    if device.type == "cpu" and group.size() > 1 and algorithm in ("auto", "shared_memory"):
        try:
            return SharedSums(group)
        except InputError:  # on all ranks alike; why is told where gradients want it too
            pass
    return NativeSums(group)
