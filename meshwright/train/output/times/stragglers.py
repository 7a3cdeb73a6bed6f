"""Names the rank that the others wait for, and what it spends its time on, from the files of times of all ranks.

    busy seconds of a rank = seconds of a window − seconds in which the rank was blocked in exchanges
    slowdown               = busy seconds of the slowest rank / median of those of the other ranks

Ranks that train together need the same time for a step; the slow one is the one that waits least. On GPUs the seconds
are those of the host, so a slow device is not seen, but a slow loader is."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
        self._step = -1  # the last step of the newest window that was looked at
        self._before: Straggler | None = None  # in the window before
        self._straggler: Straggler | None = None

    def look(self) -> None:
        """Tells the user, once, of a rank that is slow in the second window in a row."""
        if self._straggler is not None:
            return
        windows = [_last_windows(times_file(self._folder, rank)) for rank in range(self._ranks)]
        common = set.intersection(*(set(of_rank) for of_rank in windows))
        if not common or max(common) <= self._step:  # this machine may not have the files of all ranks
            return
        self._step = max(common)
        straggler, before = find_straggler([of_rank[self._step] for of_rank in windows]), self._before
        self._before = straggler
        if straggler is not None and before is not None and straggler.rank == before.rank:
            self._straggler = straggler
            self._tell(f"warning: {straggler.describe()}")

    def result(self) -> dict[str, str]:
        """What result.json says about it."""
        return {} if self._straggler is None else {"straggler": self._straggler.describe()}


@dataclass(frozen=True)
class Straggler:
    """A rank that is `slowdown` times slower than the median of the other ranks. `share` of its step is the activity
    that takes longer than on the others by the most."""

    rank: int
    slowdown: float
    activity: str
    share: float

    def describe(self) -> str:
        return (
            f"rank {self.rank} is {self.slowdown:.1f} times slower than the median of the other ranks:"
            f" {self.share:.0%} of its step is {_WORDS.get(self.activity, self.activity)}"
        )


def find_straggler(seconds: Sequence[Seconds], slow: float = SLOW) -> Straggler | None:
    """Returns the slowest rank, by the seconds of each rank in the same steps; None if no rank is `slow` times slower
    than the others."""
    if len(seconds) < 2:
        return None
    busy = [sum(window.values()) - window.get(EXCHANGE, 0.0) for window in seconds]
    slowest = max(range(len(busy)), key=busy.__getitem__)
    usual = median([value for rank, value in enumerate(busy) if rank != slowest])
    if usual <= 0 or busy[slowest] < slow * usual:
        return None
    excess = {
        name: value - median([window.get(name, 0.0) for rank, window in enumerate(seconds) if rank != slowest])
        for name, value in seconds[slowest].items()
        if name != EXCHANGE
    }
    activity = max(excess, key=excess.__getitem__)
    share = seconds[slowest][activity] / sum(seconds[slowest].values())
    return Straggler(slowest, busy[slowest] / usual, activity, share)


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
