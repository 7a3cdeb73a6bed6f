"""What runs leave behind: processes, segments of shared memory, temporary files and unfinished checkpoints."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint.manifest import checkpoints_in

_SHARED_MEMORY = Path("/dev/shm")
_SETTLE_S = 10.0
_POLL_S = 0.02
_PROCESS_ID = re.compile(r"\d+")


@dataclass(frozen=True)
class Process:
    """A process. Its id alone could be that of a later one, so the time of its start counts, too."""

    pid: int
    started: str

    def is_alive(self) -> bool:
        fields = _status(self.pid)
        return fields is not None and fields[19] == self.started and fields[0] not in ("Z", "X")


def descendants(root: int) -> set[Process]:
    """Returns the processes that descend from the process `root`, without itself. Those whose parent has died are not
    among them, unless the process is a subreaper."""
    statuses = {
        int(entry.name): fields
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and (fields := _status(int(entry.name)))
    }
    below = {root}
    while more := {pid for pid, fields in statuses.items() if int(fields[1]) in below} - below:
        below |= more
    return {Process(pid, statuses[pid][19]) for pid in below - {root}}


def _status(pid: int) -> list[str] | None:
    """The fields of a process from its state on; None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def find_leftovers(processes: set[Process], temporary: Path | None, checkpoints: Path | None = None) -> list[str]:
    """Returns a line for everything that these processes have left: those that still run, their segments of shared
    memory, and what is in the folder `temporary`, where they put temporary files, and unfinished in `checkpoints`; None
    stands for a folder that is not looked at. Processes have a few seconds to end."""
    deadline = time.monotonic() + _SETTLE_S
    while (running := {process for process in processes if process.is_alive()}) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    ids = {str(process.pid) for process in processes}
    lines = [f"process {process.pid} ({_command(process.pid)}) is running" for process in sorted_by_id(running)]
    lines += [f"segment {path} is left" for path in _segments() if ids & {*_PROCESS_ID.findall(path.name)}]
    if temporary is not None:
        lines += [f"temporary file {path} is left" for path in sorted(temporary.iterdir())]
    if checkpoints is not None and checkpoints.exists():
        whole = {path.name for path in checkpoints_in(checkpoints).values()} | {"best"}
        lines += [f"{path} is left" for path in sorted(checkpoints.iterdir()) if path.name not in whole]
    return lines


def sorted_by_id(processes: set[Process]) -> list[Process]:
    return sorted(processes, key=lambda process: process.pid)


def _segments() -> list[Path]:
    return sorted(_SHARED_MEMORY.iterdir()) if _SHARED_MEMORY.exists() else []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return "it has ended meanwhile"
