"""Kills a rank of a run from outside: `kill_at(folder, rank=1, step=7, doing="save")`."""

import os
import signal
import time

from meshwright.launch.heartbeat import HeartbeatRecord, heartbeat_file, read_heartbeat
from meshwright.train.output.folder import RunFolder

_POLL_S = 0.0005


def kill_at(
    folder: RunFolder,
    rank: int,
    step: int,
    doing: str = "",
    number: signal.Signals = signal.SIGKILL,
    timeout_s: float = 120,
) -> HeartbeatRecord:
    """Sends a signal to a rank of a running job as soon as it is at that step or beyond, doing that."""
    seen = wait_for(folder, rank, step, doing, timeout_s)
    os.kill(seen.pid, number)
    return seen


def wait_for(folder: RunFolder, rank: int, step: int, doing: str = "", timeout_s: float = 120) -> HeartbeatRecord:
    """Looks at a rank's place until it is there."""
    path = heartbeat_file(folder.logs, rank)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        seen = read_heartbeat(path)
        if seen and seen.step >= step and seen.activity.startswith(doing):
            return seen
        time.sleep(_POLL_S)
    raise TimeoutError(
        f"rank {rank} was not seen at step {step} ({doing}) within {timeout_s:g} s: {read_heartbeat(path)}"
    )
