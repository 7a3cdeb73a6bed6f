"""`ScheduledReducer`: averages gradients by a schedule (ring, tree, …). If a rank is missing, its errors name it."""

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from meshwright.collectives.execute import STREAMS, Execution, UnansweredError
from meshwright.collectives.schedules.schedule import Schedule
from meshwright.collectives.threaded import ThreadedReducer
from meshwright.errors import CollectiveError

# How long `MissingRankFinder` waits for the report of a rank that did not answer: that rank may itself be waiting for
# another rank, and reports this when it gives up.
_REPORT_S = 0.5


class ScheduledReducer(ThreadedReducer):
    """A `Reducer` that runs a schedule in a thread. It divides each tensor by the number of ranks first, as DDP does,
    and then sums in the order of the schedule. Reducers that use the same group at the same time need different bucket
    numbers, because messages are tagged with the bucket."""

    def __init__(self, group: dist.ProcessGroup, schedule: Schedule) -> None:
        execution, missing_ranks = Execution(schedule, group), MissingRankFinder(group)
        ranks = group.size()

        def reduce(flat: Tensor, bucket: int) -> None:
            flat.div_(ranks)
            try:
                execution.run(flat, stream=1 + bucket % STREAMS)
            except UnansweredError as error:
                operation = f"{schedule.name} all-reduce of bucket {bucket}"
                raise CollectiveError(f"{operation}: {missing_ranks.describe(error.peer)} ({error})") from error

        super().__init__(schedule.name, group, reduce)
        self.schedule = schedule


class MissingRankFinder:
    """Finds the rank that caused a failure. When a rank is gone, its neighbors fail, then the neighbors of these. Each
    rank that fails therefore reports in the group's store which rank did not answer it, and follows the reports of the
    other ranks to the first cause."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._store: dist.Store = group.get_group_store()
        self._store.delete_key(self._key(group.rank()))  # removes a report of an earlier attempt

    def describe(self, peer: int) -> str:
        """Reports that the group's rank `peer` did not answer this rank. Returns a sentence that names the missing rank
        by its global rank."""
        chain = [peer]
        try:
            self._store.set(self._key(self._group.rank()), str(peer))
            while (further := self._reported_by(chain[-1])) is not None and further not in chain:
                if further == self._group.rank():
                    return f"rank {self._global(chain[-1])} gave up waiting for this rank, {self._global(further)}"
                chain.append(further)
        except RuntimeError:
            pass  # the store ended with the process that served it
        reporter = f", as rank {self._global(chain[-2])} reported before it gave up" if len(chain) > 1 else ""
        return f"rank {self._global(chain[-1])} is gone or does not answer{reporter}"

    def _reported_by(self, rank: int) -> int | None:
        """Returns the rank that, by the report of `rank`, did not answer `rank`; None if `rank` reported nothing."""
        try:
            self._store.wait([self._key(rank)], timedelta(seconds=_REPORT_S))
        except dist.DistStoreError:
            return None
        return int(self._store.get(self._key(rank)))

    def _key(self, rank: int) -> str:
        return f"meshwright/lost_by/{rank}"

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)
