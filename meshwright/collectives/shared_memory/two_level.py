"""`TwoLevelMemory`: shared memory within each machine, a schedule between them.

The ranks of a machine add up their tensors in shared memory, each one slice. The ranks that hold a slice on their
machines add it up between them. Then each machine's slices are gathered in shared
memory again. So every link between machines carries each number once each way.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from meshwright.collectives.execute import STREAMS, Execution, UnansweredError
from meshwright.collectives.scheduled import Lost
from meshwright.collectives.schedules.schedule import Schedule, placed
from meshwright.collectives.schedules.two_level import across_nodes
from meshwright.collectives.shared_memory import segment
from meshwright.collectives.shared_memory.reducer import SharedMemory
from meshwright.collectives.threaded import Threaded
from meshwright.errors import CollectiveError, InputError


class TwoLevelMemory(Threaded):
    """Over a group whose machines have equally many of its ranks, at least two. All of its ranks make it at once."""

    def __init__(self, group: dist.ProcessGroup, machines: Sequence[Sequence[int]]) -> None:
        """`machines`: the group's ranks on each (`machines_of`)."""
        sizes = {len(machine) for machine in machines}
        if len(sizes) > 1 or min(sizes) < 2:
            raise InputError(
                f"machines with {', '.join(str(len(each)) for each in machines)} ranks cannot combine slices of shared"
                " memory: it takes equally many on each, and two at least"
            )
        ranks = group.size()
        (inside,) = [list(machine) for machine in machines if group.rank() in machine]
        (slot,) = [list(each) for each in zip(*machines, strict=True) if group.rank() in each]
        memory = SharedMemory(group, among=inside, operation="sum")
        # On the group that is there: a new one would want a name that all its ranks agree on.
        schedule = across_nodes(len(slot))
        rounds = tuple(placed(schedule, slot, 0))
        across = Execution(Schedule("two-level", ranks, schedule.chunks, rounds), group)
        lost = Lost(group)

        def reduce(flat: Tensor, bucket: int) -> None:
            own = memory.reduce_scatter(flat, bucket).div_(ranks)
            try:
                across.run(own, stream=1 + bucket % STREAMS)
            except UnansweredError as error:
                what = f"two-level all-reduce of bucket {bucket}, between machines"
                raise CollectiveError(f"{what}: {lost.describe(error.peer)} ({error})") from error
            memory.all_gather(flat, bucket)

        super().__init__("two-level", group, reduce)
        self._memory = memory

    def close(self) -> None:
        super().close()
        self._memory.close()


def machines_of(group: dist.ProcessGroup) -> list[list[int]]:
    """The group's ranks by the machine they are on; all of its ranks ask together."""
    place = segment.here()
    places: list[object] = [None] * group.size()
    dist.all_gather_object(places, (place.machine, place.namespace), group=group)
    return [[rank for rank, machine in enumerate(places) if machine == each] for each in dict.fromkeys(places)]
