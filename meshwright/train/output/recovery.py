"""Measures how long a run takes to recover: from when the launcher notices a failure until the next step is finished.

`record_recovery` runs on rank 0 of every start after a failure. It tells the user, and writes a line to
times/recoveries.jsonl of the run, which `recovery_figures` reads for the result. The parts of the time:

    stop      finding the cause of the failure, ending the other ranks, and on several machines meeting again
    start     starting the process of this rank, with its imports if there is no spare process (`train.spare`)
    join      connecting to the other ranks
    build     building the model and dividing it as the plan says
    load      finding, verifying and loading the newest checkpoint
    evaluate  an evaluation that the failure interrupted
    step      the first batch and the first step
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.files.foreign import json_lines, read_bytes
from meshwright.processes.environment import RestartTimes
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.local.spare import spare_memory_bytes
from meshwright.processes.world import World
from meshwright.train.output.folder import RunFolder

PARTS = ("stop", "start", "join", "build", "load", "evaluate", "step")


@contextmanager
def record_recovery(
    restart: RestartTimes | None,
    began: float | None,
    world: World,
    folder: RunFolder,
    heartbeat: Heartbeat,
    tell: Callable[[str], None],
) -> Iterator[None]:
    """Measures the recovery until the first step within this context, and passes a line about it to `tell`. `began` is
    when this process began to run as a rank; None if that is not known. Does nothing if `restart` is None, because no
    failure was before this start."""
    if restart is None:
        yield
        return
    timer = _RecoveryTimer(restart, began, world.attempt, folder.recoveries, tell)
    heartbeat.listeners.append(timer)
    try:
        yield
    finally:
        with suppress(ValueError):
            heartbeat.listeners.remove(timer)


class _RecoveryTimer:
    """A listener of the heartbeat, which begins when this rank has joined the others and ends with the first step."""

    def __init__(
        self, restart: RestartTimes, began: float | None, attempt: int, file: Path, tell: Callable[[str], None]
    ) -> None:
        joined = time.time()
        began = restart.started if began is None else began
        self._restart = restart
        self._attempt = attempt
        self._file = file
        self._tell = tell
        self._seconds = {
            "stop": restart.started - restart.noticed,
            "start": began - restart.started,
            "join": joined - began,
        }
        self._part = "build"
        self._since = joined
        self._step = 0
        self._is_over = False

    def enter(self, step: int, activity: str) -> None:
        self._step = step
        self._begin(_part_of(activity))

    def finish_step(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._begin("")
        parts = {part: round(self._seconds[part], 4) for part in PARTS if part in self._seconds}
        seconds = round(self._since - self._restart.noticed, 4)
        noticed = self._restart.noticed
        line = {"attempt": self._attempt, "step": self._step, "noticed": noticed, "seconds": seconds, "parts": parts}
        with suppress(OSError), self._file.open("a") as file:  # a full disk does not end the run
            file.write(json.dumps(line) + "\n")
        self._tell(f"going on {seconds:.2f} s after the failure was noticed: {describe_parts(parts)}")

    def _begin(self, part: str) -> None:
        now = time.time()
        self._seconds[self._part] = self._seconds.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now


def _part_of(activity: str) -> str:
    if activity == "load checkpoint":
        return "load"
    return "evaluate" if activity.startswith("evaluate") else "step"


def describe_parts(parts: dict[str, float]) -> str:
    return ", ".join(f"{part} {seconds:.2f} s" for part, seconds in parts.items())


def read_recoveries(folder: RunFolder) -> list[dict[str, Any]]:
    """Returns the recoveries of a run: the `attempt` that began, its first `step`, when the failure was `noticed`, the
    `seconds` until the end of that step, and their `parts`."""
    try:
        return json_lines(read_bytes(folder.recoveries))
    except (OSError, ValueError):
        return []


def recovery_figures(folder: RunFolder) -> dict[str, Any]:
    """Returns the entries of result.json about recoveries: the median seconds of a recovery and of its parts, which are
    None if there was none, and the memory of the process that starts the ranks, which is None under other launchers."""
    recoveries = read_recoveries(folder)
    parts = {
        part: median(recovery["parts"].get(part, 0.0) for recovery in recoveries)
        for part in PARTS
        if any(part in recovery["parts"] for recovery in recoveries)
    }
    return {
        "recovery_s": median(recovery["seconds"] for recovery in recoveries) if recoveries else None,
        "recovery_parts_s": parts or None,
        "spare_memory_bytes": spare_memory_bytes(),
    }
