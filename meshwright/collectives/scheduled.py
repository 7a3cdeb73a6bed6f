"""`Scheduled`: a reducer that runs a schedule, and says which rank is missing where one is."""

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from meshwright.collectives.execute import STREAMS, Execution, UnansweredError
from meshwright.collectives.schedules.schedule import Schedule
from meshwright.collectives.threaded import Threaded
from meshwright.errors import CollectiveError

# How long a rank that lost another one waits to hear whether that one had lost somebody itself.
_WORD_S = 0.5


class Scheduled(Threaded):
    """Divides by the number of ranks first, as DDP does, and then sums in the schedule's order. Reducers that share a
    group at the same time number their buckets differently: messages are told apart by bucket."""

    def __init__(self, group: dist.ProcessGroup, schedule: Schedule) -> None:
        execution, lost = Execution(schedule, group), Lost(group)
        ranks = group.size()

        def reduce(flat: Tensor, bucket: int) -> None:
            flat.div_(ranks)
            try:
                execution.run(flat, stream=1 + bucket % STREAMS)
            except UnansweredError as error:
                what = f"{schedule.name} all-reduce of bucket {bucket}"
                raise CollectiveError(f"{what}: {lost.describe(error.peer)} ({error})") from error

        super().__init__(schedule.name, group, reduce)


class Lost:
    """Tells who is really missing. A rank whose neighbor is gone ends; its other neighbors then miss that one, which is
    not to blame. So each leaves a word in the group's store about whom it lost."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._store: dist.Store = group.get_group_store()
        self._store.delete_key(self._key(group.rank()))  # of an earlier attempt

    def describe(self, peer: int) -> str:
        """`peer`: the one in the group that did not answer this rank."""
        chain = [peer]
        try:
            self._store.set(self._key(self._group.rank()), str(peer))
            while (further := self._told_by(chain[-1])) is not None and further not in chain:
                if further == self._group.rank():
                    return f"rank {self._global(chain[-1])} gave up waiting for this rank, {self._global(further)}"
                chain.append(further)
        except RuntimeError:
            pass  # the store has gone with the rank that kept it
        told = f", which rank {self._global(chain[-2])} told before it gave up" if len(chain) > 1 else ""
        return f"rank {self._global(chain[-1])} is gone or does not answer{told}"

    def _told_by(self, rank: int) -> int | None:
        try:
            self._store.wait([self._key(rank)], timedelta(seconds=_WORD_S))
        except dist.DistStoreError:
            return None
        return int(self._store.get(self._key(rank)))

    def _key(self, rank: int) -> str:
        return f"meshwright/lost_by/{rank}"

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)
