"""`SharedSegment`: the shared memory through which ranks on one machine see each other's progress. Each rank has one
segment. It has no name: the other ranks open it through /proc, and it is freed when the last of them ends."""

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError

RING = 64  # number of collectives that a rank may have started and not finished
SLOTS = 256  # number of storages of a rank that its peers keep mapped
STAGE_BYTES = 65536  # the largest tensor that can be copied into the segment
LINE_WORDS = 16  # two cache lines, which a processor fetches at once: two ranks never write to the same pair


class Descriptor(ctypes.Structure):
    """What a rank contributes to a collective: where its tensor is, its size and type, and the operation (`verb`)."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("slot", "generation", "file_descriptor", "file_bytes", "offset")),
        *((name, ctypes.c_int64) for name in ("count", "type", "verb", "mean", "staged", "bucket")),
        ("unused", ctypes.c_int64 * 5),
    ]


class SharedSegment(ctypes.Structure):
    """What one rank writes and the others read. `shared_memory.c` explains the counters. `stopped_by` is 0 while the
    rank takes part. Afterwards it is 1 + the rank because of which it stopped, which is its own rank if it closed."""

    _fields_ = [
        ("published", ctypes.c_int64),
        ("retired", ctypes.c_int64),
        ("unused0", ctypes.c_int64 * (LINE_WORDS - 2)),
        ("done", ctypes.c_int64),
        ("unused1", ctypes.c_int64 * (LINE_WORDS - 1)),
        ("stopped_by", ctypes.c_int64),
        ("unused2", ctypes.c_int64 * (LINE_WORDS - 1)),
        ("ring", Descriptor * RING),
        ("generations", ctypes.c_int64 * SLOTS),
        ("stage", ctypes.c_char * (RING * STAGE_BYTES)),
    ]


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process. Processes with the same `machine` and `namespace` can open each other's memory."""

    host: str
    machine: str  # the boot id of the kernel
    namespace: str
    pid: int
    start_time: str


def this_process() -> ProcessIdentity:
    return ProcessIdentity(
        host=os.uname().nodename,
        machine=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        namespace=os.readlink("/proc/self/ns/pid"),
        pid=os.getpid(),
        start_time=_state_and_start_time(os.getpid())[1],
    )


def why_not_shareable(processes: Sequence[ProcessIdentity]) -> str | None:
    """Returns why these processes, in the order of ranks, cannot share memory; None where they can."""
    first = processes[0]
    for rank, process in enumerate(processes):
        if process.machine != first.machine:
            return f"rank 0 of the group runs on {first.host}, rank {rank} on {process.host}"
        if process.namespace != first.namespace:
            return f"ranks 0 and {rank} of the group run in two containers on {first.host}"
    return None


def is_alive(process: ProcessIdentity) -> bool:
    """Whether the process still runs: it is not a zombie, and its pid was not given to another process."""
    try:
        state, start_time = _state_and_start_time(process.pid)
    except (OSError, IndexError):
        return False
    return state not in "ZX" and start_time == process.start_time


def _state_and_start_time(pid: int) -> tuple[str, str]:
    """Parses /proc/PID/stat after the program's name, which may contain blanks and parentheses."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def create_segment() -> tuple[int, SharedSegment]:
    """Returns a new segment of zeros, after the file descriptor by which other processes open it."""
    file = os.memfd_create("meshwright", os.MFD_CLOEXEC)
    os.ftruncate(file, ctypes.sizeof(SharedSegment))
    return file, _mapped(file)


def open_segment(process: ProcessIdentity, file: int) -> SharedSegment:
    """Returns the segment that another process created as its file descriptor `file`."""
    path = f"/proc/{process.pid}/fd/{file}"
    try:
        local_file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"{path} cannot be opened: {error.strerror}") from None
    try:
        return _mapped(local_file)
    finally:
        os.close(local_file)


def _mapped(file: int) -> SharedSegment:
    """Returns the mapped segment; the mapping ends with the returned object."""
    return SharedSegment.from_buffer(mmap.mmap(file, ctypes.sizeof(SharedSegment)))
