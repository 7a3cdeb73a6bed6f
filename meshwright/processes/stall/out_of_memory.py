"""Errors of a rank that ran out of memory: where it was, how much it wanted, and what was in memory by kind; and
whether the system has killed a process because memory was full."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from meshwright.numbers.units import bytes_text
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.stall.position import find_position, stack_of_error
from meshwright.processes.stall.record import innermost

_CPU_MESSAGE = re.compile(r"DefaultCPUAllocator: (not enough|can't allocate) memory", re.IGNORECASE)
_WANTED = re.compile(r"ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_CGROUP = Path("/sys/fs/cgroup")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error) is RuntimeError and bool(_CPU_MESSAGE.search(str(error)))


def describe_out_of_memory(error: BaseException, heartbeat: Heartbeat) -> str:
    """Returns a sentence that begins with `out of memory`."""
    place = find_position(stack_of_error(innermost(error).__traceback__)).place
    wanted = _WANTED.search(str(error))
    text = f"out of memory in {place}"
    if wanted:
        text += f": it wanted {bytes_text(float(wanted[1]) * _UNITS[wanted[2].lower()])} more"
    kinds: Mapping[str, int] = heartbeat.memory() if heartbeat.memory is not None else {}
    if kinds:
        parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in kinds.items())
        text += f"; in use were {bytes_text(sum(kinds.values()))}: {parts}"
    return text


def killed_for_memory() -> int:
    """Returns how many processes of this container or machine the system has killed because memory was full; 0 where
    Linux does not tell it."""
    for path in _event_files():
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
        if counts:
            return counts[0]
    return 0


def _event_files() -> list[Path]:
    """The files that count such kills: of this process's control group in versions 2 and 1, and of the system."""
    group = ""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or "memory" in controllers.split(","):
                group = path.strip("/")
    except (OSError, ValueError):
        pass
    return [
        _CGROUP / group / "memory.events",
        _CGROUP / "memory.events",
        _CGROUP / "memory" / group / "memory.oom_control",
        _CGROUP / "memory" / "memory.oom_control",
        Path("/proc/vmstat"),
    ]
