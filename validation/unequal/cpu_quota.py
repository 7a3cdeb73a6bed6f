"""Holds a process to a part of a core, by a cgroup of Linux (version 1 or 2). Needs the rights to make one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PERIOD_US = 10_000


@contextmanager
def cpu_quota(name: str, cores: float) -> Iterator[Path]:
    """Makes a cgroup whose processes together use so many cores at most. Yields the file that takes their ids."""
    quota = int(PERIOD_US * cores)
    first, second = Path("/sys/fs/cgroup/cpu") / name, Path("/sys/fs/cgroup") / name
    folder = first if first.parent.is_dir() else second
    folder.mkdir()
    try:
        if folder is first:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()  # which works once its processes have ended
