"""Names the rank that the others wait for, and what it spends its time on, from the files of times of all ranks.

    busy seconds of a rank = seconds of a window − seconds in which the rank was blocked in exchanges
    slowdown               = busy seconds of the slowest rank / median of those of the other ranks

Ranks that train together need the same time for a step; the slow one is the one that waits least. On GPUs the seconds
are those of the host, so a slow device is not seen, but a slow loader is."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from meshwright.train.output.activity_times import EXCHANGE, times_file

SLOW = 1.5  # a rank that is so many times slower than the others is named
_TAIL_BYTES = 8192
_WORDS = {"data": "loading data", "forward": "the forward pass", "backward": "the backward pass"}

Seconds = Mapping[str, float]  # by activity, of one window


class StragglerWatch:
    """Looks for a slow rank when steps are logged. `folder` has the files of times. `tell` gets a line for the user."""

    def __init__(self, folder: Path, ranks: int, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._folder = folder
        self._ranks = ranks
        self._slow_rank = ""  # in the window before
        self._line: str | None = None

    def look(self) -> None:
        """Tells the user, once, of a rank that is slow for the second window in a row."""
        line = describe_straggler(self._folder, self._ranks) if self._line is None else None
        rank, before = line.partition(" is ")[0] if line else "", self._slow_rank
        self._slow_rank = rank
        if line and rank == before:
            self._line = line
            self._tell(f"warning: {line}")

    def result(self) -> dict[str, str]:
        """What result.json says about it."""
        return {} if self._line is None else {"straggler": self._line}


def describe_straggler(folder: Path, ranks: int) -> str | None:
    """Returns a line about the slowest rank in the newest window that all ranks have written; None if no rank is slow,
    or if this machine does not have the files of all ranks."""
    windows = [_last_windows(times_file(folder, rank)) for rank in range(ranks)]
    common = set.intersection(*(set(of_rank) for of_rank in windows))
    if not common:
        return None
    step = max(common)
    return name_straggler([of_rank[step] for of_rank in windows])


def name_straggler(seconds: Sequence[Seconds]) -> str | None:
    """Returns the line for the seconds of each rank in the same window; None if no rank is slow."""
    if len(seconds) < 2:
        return None
    busy = [sum(window.values()) - window.get(EXCHANGE, 0.0) for window in seconds]
    slow = max(range(len(busy)), key=busy.__getitem__)
    others = [value for rank, value in enumerate(busy) if rank != slow]
    usual = median(others)
    if usual <= 0 or busy[slow] < SLOW * usual:
        return None
    excess = {
        name: value - median([window.get(name, 0.0) for rank, window in enumerate(seconds) if rank != slow])
        for name, value in seconds[slow].items()
        if name != EXCHANGE
    }
    cause = max(excess, key=excess.__getitem__)
    share = seconds[slow][cause] / sum(seconds[slow].values())
    return (
        f"rank {slow} is {busy[slow] / usual:.1f} times slower than the median of the other ranks: {share:.0%} of its"
        f" step is {_WORDS.get(cause, cause)}"
    )


def _last_windows(file: Path) -> dict[int, Seconds]:
    """Returns the seconds of the last windows in the file by their last step."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _TAIL_BYTES))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return {}
    windows: dict[int, Seconds] = {}
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:  # the first line may be cut, and the last one incomplete
            continue
        if "steps" in values:
            windows[int(values["step"])] = values["seconds"]
    return windows
