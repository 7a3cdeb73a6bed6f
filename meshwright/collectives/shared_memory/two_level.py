"""`TwoLevelMemoryReducer`: shared memory within each machine, a schedule between machines.

The ranks of a machine add up their tensors in shared memory, each rank one slice. The ranks that have the same slice on
different machines sum it between them. Then the ranks of each machine gather all slices in shared memory. Each of m
machines thus sends 2(m - 1)/m of the tensor to other machines, spread over its ranks.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from meshwright.collectives.execute import STREAMS, Execution, UnansweredError
from meshwright.collectives.scheduled import MissingRankFinder
from meshwright.collectives.schedules.schedule import Schedule, placed
from meshwright.collectives.schedules.two_level import across_nodes
from meshwright.collectives.shared_memory import segment
from meshwright.collectives.shared_memory.reducer import SharedMemoryReducer
from meshwright.collectives.threaded import ThreadedReducer
from meshwright.errors import CollectiveError, InputError
from meshwright.messages.exchange import all_gather_values


class TwoLevelMemoryReducer(ThreadedReducer):
    """A `Reducer` over a group with the same number of ranks, at least two, on each machine. All ranks of the group
    create it at the same time."""

    def __init__(self, group: dist.ProcessGroup, machines: Sequence[Sequence[int]]) -> None:
        """`machines` lists, for each machine, its ranks in the group (`machines_of`)."""
        sizes = {len(machine) for machine in machines}
        if len(sizes) > 1 or min(sizes) < 2:
            raise InputError(
                f"machines with {', '.join(str(len(machine)) for machine in machines)} ranks cannot combine slices of"
                " shared memory: every machine needs the same number of ranks, and at least two"
            )
        world_size = group.size()
        (local_ranks,) = [list(machine) for machine in machines if group.rank() in machine]
        (slice_holders,) = [list(ranks) for ranks in zip(*machines, strict=True) if group.rank() in ranks]
        memory = SharedMemoryReducer(group, among=local_ranks, operation="sum")
        # The schedule between machines runs on the existing group, because a new group would need a name on which all
        # its ranks agree.
        schedule = across_nodes(len(slice_holders))
        rounds = tuple(placed(schedule, slice_holders, 0))
        across = Execution(Schedule("two-level", world_size, schedule.chunks, rounds), group)
        missing_ranks = MissingRankFinder(group)

        def reduce(flat: Tensor, bucket: int) -> None:
            rank_slice = memory.reduce_scatter(flat, bucket).div_(world_size)
            try:
                across.run(rank_slice, stream=1 + bucket % STREAMS)
            except UnansweredError as error:
                operation = f"two-level all-reduce of bucket {bucket}, between machines"
                raise CollectiveError(f"{operation}: {missing_ranks.describe(error.peer)} ({error})") from error
            memory.all_gather(flat, bucket)

        super().__init__("two-level", group, reduce)
        self._memory = memory

    def close(self) -> None:
        super().close()
        self._memory.close()


def machines_of(group: dist.ProcessGroup) -> list[list[int]]:
    """Returns, for each machine, the list of its ranks in the group. Containers that cannot share memory, or
    have networks of their own, count as different machines. All ranks of the group call this together."""
    process = segment.this_process()
    machine_of_rank = all_gather_values((process.machine, process.namespace), group)
    return [
        [rank for rank, machine in enumerate(machine_of_rank) if machine == name]
        for name in dict.fromkeys(machine_of_rank)
    ]
