"""Whether other programs use the cores that are measured, which makes measurements slower than the machine is.

others    core seconds in which the machine was busy, less those of this process and of its ended children
missing   of the cores that this process may use, those that `others` leave no room for: 0 if other cores are free
busy      more than a tenth of the cores that this process may use are missing
"""

import os
import time
from pathlib import Path

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.cores import usable_cores

_MOST_MISSING = 0.1  # chosen: of the usable cores; above it, a measurement is marked
_FEWEST_MISSING = 0.2  # chosen: cores, which the kernel's own work does not reach
_GLANCE_S = 0.2


class OtherPrograms:
    """Counts what other programs compute, from its construction on. `counts` is the kernel's file of the machine's
    times."""

    def __init__(self, counts: Path = Path("/proc/stat")) -> None:
        self._file = counts
        self._begin = self._now()

    def cores(self) -> float:
        """The cores that are missing because of other programs, on average since the construction; 0 if they are too
        few to matter, or if the kernel does not count them."""
        begin, end = self._begin, self._now()
        if begin is None or end is None or end[0] <= begin[0]:
            return 0.0
        seconds, machine_s, own_s = (after - before for before, after in zip(begin, end, strict=True))
        usable = usable_cores()
        elsewhere = max(0, (os.cpu_count() or usable) - usable)
        missing = min(float(usable), (machine_s - own_s) / seconds - elsewhere)
        return round(missing, 2) if missing > max(_FEWEST_MISSING, _MOST_MISSING * usable) else 0.0

    def _now(self) -> tuple[float, float, float] | None:
        """The time, the core seconds in which the machine was busy, and those of this process and its children."""
        try:
            words = self._file.read_text().split("\n", 1)[0].split()
            user, nice, system, _, _, interrupts, soft_interrupts, stolen = (int(word) for word in words[1:9])
        except (OSError, ValueError):
            return None
        ticks = user + nice + system + interrupts + soft_interrupts + stolen
        own = os.times()
        own_s = own.user + own.system + own.children_user + own.children_system
        return time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), own_s


def is_idle_now() -> bool:
    """Whether no other program uses the cores of this machine; it is looked at for a moment."""
    others = OtherPrograms()
    time.sleep(_GLANCE_S)
    return not others.cores()


def busy_sentence(cluster: Cluster) -> str | None:
    """What to say with a prediction for a cluster that was measured while other programs used it; None if it was
    not."""
    if not cluster.busy_cores:
        return None
    return (
        f"Other programs used {cluster.busy_cores:.2g} of {cluster.cores} cores while this machine was measured, so"
        " predicted times may be too long: once they have ended, the machine is measured again"
    )
