"""Which cluster a name means: this machine as it is, or as several CPU devices."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError


def find(name: str) -> Cluster:
    """`local`: every GPU, or else one device a usable core; `3xcpu`: three CPU devices sharing the cores."""
    cores = usable_cores()
    if name == "local":
        gpus = torch.cuda.device_count()
        if gpus:
            return Cluster(name=name, device="cuda", devices=gpus, cores=cores)
        return Cluster(name=name, device="cpu", devices=cores, cores=cores)
    several = re.fullmatch(r"([1-9]\d{0,3})x(cpu|CPU)", name)
    if several:
        return Cluster(name=name, device="cpu", devices=int(several[1]), cores=cores)
    raise InputError(
        f"cluster '{name}' is not known: write 'local' for this machine as it is,"
        " or '3xcpu' for three CPU devices on it"
    )


def usable_cores(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores this process may run on, within the CPU quota of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([allowed, *_quotas(cgroups, _own_groups())])))


def _own_groups() -> list[str]:
    """The paths of this process in the cgroup trees, such as `/user.slice/session-1.scope`."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = [line.split(":", 2) for line in lines]
    return [path for _, controllers, path in groups if not controllers or "cpu" in controllers.split(",")]


def _quotas(cgroups: Path, groups: list[str]) -> Iterator[float]:
    """Cores' worth of CPU time allowed by each group around this process, in cgroup v2 and in v1."""
    for root in (cgroups, cgroups / "cpu", cgroups / "cpu,cpuacct"):
        # Inside a container the own group is mounted as the root, whatever path the kernel tells.
        folders = {root}
        for group in groups:
            own = root / group.lstrip("/")
            folders.update(folder for folder in (own, *own.parents) if folder.is_relative_to(root))
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
