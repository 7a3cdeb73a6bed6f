"""The number of CPU cores that this process may use, from its affinity mask and the CPU quota of its container."""

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the number of cores that this process may run on, at least 1; quotas are read below `cgroups`."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([allowed, *_quotas(cgroups, _cgroup_paths())])))


def _cgroup_paths() -> list[str]:
    """Returns the paths of this process in the cgroup trees, such as `/user.slice/session-1.scope`."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = [line.split(":", 2) for line in lines]
    return [path for _, controllers, path in groups if not controllers or "cpu" in controllers.split(",")]


def _quotas(cgroups: Path, groups: list[str]) -> Iterator[float]:
    """Yields the CPU quota, in cores, of each cgroup that contains this process, in cgroup v2 and v1."""
    for root in (cgroups, cgroups / "cpu", cgroups / "cpu,cpuacct"):
        # Inside a container the cgroup of the container is mounted as the root, whatever path the kernel reports.
        folders = {root}
        for group in groups:
            group_folder = root / group.lstrip("/")
            folders.update(folder for folder in (group_folder, *group_folder.parents) if folder.is_relative_to(root))
        for folder in sorted(folders):
            yield from _quota(folder)


def _quota(folder: Path) -> Iterator[float]:
    limit = _words(folder / "cpu.max") or [
        *_words(folder / "cpu.cfs_quota_us"),
        *_words(folder / "cpu.cfs_period_us"),
    ]
    if len(limit) == 2 and limit[0] not in ("max", "-1") and float(limit[1]) > 0:
        yield float(limit[0]) / float(limit[1])


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
