"""`SmallSums`: all-reduces of a few numbers while training continues, such as losses, counts, and which parameters a
step used.

Such sums cost latency, not bandwidth. A backend such as Gloo has to wake its threads for each of them, while the ranks
keep all cores busy. In shared memory each rank only writes its numbers, and then reads and adds the numbers of all
ranks.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.collectives.shared_memory.reducer import SharedMemoryReducer
from meshwright.collectives.shared_memory.steps import STAGE_UP_TO_BYTES
from meshwright.collectives.wait_clock import WAIT_CLOCK
from meshwright.errors import InputError
from meshwright.plan_fields.groups import Algorithm

SUMS = "sum of losses or counts over the ranks"


class SmallSums(Protocol):
    """Sums small tensors over the ranks of a group."""

    def start(self, numbers: Tensor) -> Callable[[], Tensor]:
        """Starts to replace `numbers`, in place, by the sum over all ranks. Returns a function that waits for the sum
        and returns it. Every rank starts the same sums in the same order, and waits for them in the same order."""
        ...

    def close(self) -> None: ...


class NativeSmallSums:
    """`SmallSums` through the backend of the process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, numbers: Tensor) -> Callable[[], Tensor]:
        work = dist.all_reduce(numbers, group=self._group, async_op=True)

        def result() -> Tensor:
            with WAIT_CLOCK.blocked(SUMS):
                work.wait()
            return numbers

        return result

    def close(self) -> None:
        """Does nothing: the group belongs to its creator."""


class SharedMemorySums:
    """`SmallSums` in shared memory, for ranks on one machine and CPU tensors of at most `LARGEST_BYTES`."""

    LARGEST_BYTES = STAGE_UP_TO_BYTES  # the storage of a larger tensor would have to move into shared memory each time

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._memory = SharedMemoryReducer(group, operation="sum", what="sum")
        self._number = 0

    def start(self, numbers: Tensor) -> Callable[[], Tensor]:
        assert numbers.numel() * numbers.element_size() <= self.LARGEST_BYTES, f"{numbers.numel()} numbers are too many"
        self._memory.start(numbers, self._number)
        self._number += 1

        def result() -> Tensor:
            with WAIT_CLOCK.blocked(SUMS):
                self._memory.finish()
            return numbers

        return result

    def close(self) -> None:
        self._memory.close()


def make_small_sums(
    algorithm: Algorithm, group: dist.ProcessGroup, device: torch.device
) -> NativeSmallSums | SharedMemorySums:
    """Returns `SharedMemorySums` for CPU ranks that can share memory, if `algorithm` is `auto` or `shared_memory`, and
    `NativeSmallSums` otherwise. All ranks of the group call this together."""
    if device.type == "cpu" and group.size() > 1 and algorithm in ("auto", "shared_memory"):
        try:
            return SharedMemorySums(group)
        except InputError:  # all ranks raise it or none does; `make_reducer` reports the reason
            pass
    return NativeSmallSums(group)
