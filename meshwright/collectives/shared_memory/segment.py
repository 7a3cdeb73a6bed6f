"""`SharedSegment`: the shared memory through which ranks on one machine see each other's progress. Each rank has one
segment. A segment is a file without a name, which the other ranks open through /proc. It is freed when the last process
that has it open ends."""

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError

RING = 64  # number of collectives that a rank may have started and not finished
SLOTS = 256  # number of storages of a rank that its peers keep mapped
STAGE_BYTES = 65536  # the largest tensor that can be copied into the segment
LINE_WORDS = 16  # 128 bytes: two cache lines, which a processor fetches at once


class Descriptor(ctypes.Structure):
    """Describes a rank's contribution to a collective: where its tensor is, the tensor's size and type, and the
    operation (`verb`)."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("slot", "generation", "file_descriptor", "file_bytes", "offset")),
        *((name, ctypes.c_int64) for name in ("count", "type", "verb", "mean", "staged", "bucket")),
        ("unused", ctypes.c_int64 * 5),
    ]


class SharedSegment(ctypes.Structure):
    """The memory that one rank writes and the other ranks read. `shared_memory.c` explains the counters. `stopped_by`
    is 0 while the rank takes part. After the rank has stopped, it is 1 + the rank that caused this: the rank itself if
    it closed its reducer, or the rank that it missed."""

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
    """Identifies a process. Processes with the same `machine` and `namespace` are on one machine and share memory. The
    `namespace` is that of PIDs, without which they cannot open each other's memory, and that of the network: containers
    with networks of their own are several machines, as for the planner and the order of ranks (processes/network)."""

    host: str
    machine: str  # the boot id of the kernel
    namespace: str
    pid: int
    start_time: str


def missing_on_this_system() -> str | None:
    """Returns why ranks cannot share memory on this operating system; None on Linux, where they can."""
    if sys.platform == "linux":
        return None
    return f"ranks open each other's memory through Linux's /proc, which {sys.platform} does not have"


def this_process() -> ProcessIdentity:
    """Returns the identity of this process. On systems other than Linux, processes of one host are those of one
    machine."""
    if missing_on_this_system():
        host = os.uname().nodename
        return ProcessIdentity(host, machine=host, namespace="", pid=os.getpid(), start_time="")
    return ProcessIdentity(
        host=os.uname().nodename,
        machine=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        namespace=f"{os.readlink('/proc/self/ns/pid')} {os.readlink('/proc/self/ns/net')}",
        pid=os.getpid(),
        start_time=_state_and_start_time(os.getpid())[1],
    )


def why_not_shareable(processes: Sequence[ProcessIdentity]) -> str | None:
    """Returns why these processes (in the order of ranks) cannot share memory; None if they can."""
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
    """Returns the state letter and the start time from /proc/PID/stat. Only what follows the last parenthesis is
    parsed, because the program's name before it may contain blanks and parentheses."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def create_segment() -> tuple[int, SharedSegment]:
    """Returns (file descriptor, segment) of a new segment of zeros. Other processes open it by the descriptor."""
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
    """Maps the file as a segment. The mapping ends when the returned object is freed."""
    return SharedSegment.from_buffer(mmap.mmap(file, ctypes.sizeof(SharedSegment)))
