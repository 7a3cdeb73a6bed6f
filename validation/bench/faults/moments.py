"""`Moment`: when something is done to a rank of a running job: at which step, and during what. It is read from the
heartbeat that every rank writes to the run's folder."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.checkpoint.save import WRITING
from meshwright.processes.heartbeat import START_UP, HeartbeatRecord, heartbeat_file, read_heartbeat
from meshwright.train.output.folder import RunFolder

_POLL_S = 0.0005
# Parts of a run that are more than one activity of the heartbeat, or have another name there.
START, RESTART, PUBLISH = "start", "restart", "publish"
_ACTIVITIES = {"evaluation": "evaluate"}
_BEFORE_THE_FIRST_STEP = (START_UP, "load checkpoint")


@dataclass(frozen=True)
class Moment:
    """The first time that a rank is at this step or a later one, during this part of the run.

    `during` is an activity of the heartbeat, such as `data`, `forward`, `backward`, `optimizer`, `save` or
    `evaluation`; `start` or `restart`, which last until the newest checkpoint is loaded; or `publish`, in which a
    checkpoint is written while training goes on. Empty means any time. `attempt` is the least number of restarts before
    it. From step `latest` on, any part will do; None means that it has to be this one."""

    rank: int
    step: int = 0
    during: str = ""
    attempt: int = 0
    latest: int | None = None

    def is_now(self, run: RunFolder, seen: HeartbeatRecord) -> bool:
        if seen.attempt < self.attempt:
            return False
        if self.latest is not None and seen.step >= self.latest:
            return True
        if self.during in (START, RESTART):
            is_restart = seen.attempt > 0
            is_before = seen.completed == 0 and seen.activity in _BEFORE_THE_FIRST_STEP
            return is_before and is_restart == (self.during == RESTART)
        if seen.step < self.step:
            return False
        if self.during == PUBLISH:
            return any(run.checkpoints.glob(f"{WRITING}*"))
        return seen.activity.startswith(_ACTIVITIES.get(self.during, self.during))

    def wait(
        self, run: RunFolder, timeout_s: float = 120, is_over: Callable[[], bool] = lambda: False
    ) -> HeartbeatRecord | None:
        """Waits for this moment, and returns the heartbeat. Returns None if `is_over` became true before it. Raises a
        TimeoutError if it did not come in time."""
        path = heartbeat_file(run.logs, self.rank)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            seen = read_heartbeat(path)
            if seen and self.is_now(run, seen):
                return seen
            if is_over():
                return None
            time.sleep(_POLL_S)
        raise TimeoutError(f"{self} did not come within {timeout_s:g} s; the heartbeat is {read_heartbeat(path)}")


def wait_for(run: RunFolder, rank: int, step: int, during: str = "", timeout_s: float = 120) -> HeartbeatRecord:
    """Waits until a rank of a running job is at this step or a later one, during this activity."""
    seen = Moment(rank, step, during).wait(run, timeout_s)
    assert seen is not None
    return seen
