"""The memory through which ranks on one machine tell each other how far they are: one nameless segment a rank, which
the others open through the process file system, and which is gone with the last of them."""

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError

RING = 64  # collectives that a rank may have started and not finished
SLOTS = 256  # storages that the peers keep open of a rank
STAGE_BYTES = 65536  # the largest tensor that can be copied into the segment
LINE_WORDS = 16  # 128 bytes: two ranks never write to one line, nor to the pair that a processor fetches at once


class Descriptor(ctypes.Structure):
    """What a rank brings to a collective: where its tensor lies, what it is, and what becomes of it."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("slot", "generation", "file_descriptor", "file_bytes", "offset")),
        *((name, ctypes.c_int64) for name in ("count", "type", "verb", "mean", "staged", "bucket")),
        ("unused", ctypes.c_int64 * 5),
    ]


class Segment(ctypes.Structure):
    """What one rank writes and the others read; `shared_memory.c` says what the counters mean. `left` is one more than
    the rank because of which this one takes part no longer."""

    _fields_ = [
        ("published", ctypes.c_int64),
        ("retired", ctypes.c_int64),
        ("unused0", ctypes.c_int64 * (LINE_WORDS - 2)),
        ("done", ctypes.c_int64),
        ("unused1", ctypes.c_int64 * (LINE_WORDS - 1)),
        ("left", ctypes.c_int64),
        ("unused2", ctypes.c_int64 * (LINE_WORDS - 1)),
        ("ring", Descriptor * RING),
        ("generations", ctypes.c_int64 * SLOTS),
        ("stage", ctypes.c_char * (RING * STAGE_BYTES)),
    ]


@dataclass(frozen=True)
class Place:
    """Where a process runs: those with the same `machine` and `namespace` can open each other's memory."""

    host: str
    machine: str  # made anew at every boot
    namespace: str
    pid: int
    born: str


def here() -> Place:
    return Place(
        host=os.uname().nodename,
        machine=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        namespace=os.readlink("/proc/self/ns/pid"),
        pid=os.getpid(),
        born=_life(os.getpid())[1],
    )


def apart(places: Sequence[Place]) -> str | None:
    """Why these processes cannot share memory; None where they can. `places` by rank of the group."""
    first = places[0]
    for rank, place in enumerate(places):
        if place.machine != first.machine:
            return f"rank 0 of the group runs on {first.host}, rank {rank} on {place.host}"
        if place.namespace != first.namespace:
            return f"ranks 0 and {rank} of the group run in two containers on {first.host}"
    return None


def alive(place: Place) -> bool:
    """Whether the process still runs: not gone, not a zombie, and not another one with its number."""
    try:
        state, born = _life(place.pid)
    except (OSError, IndexError):
        return False
    return state not in "ZX" and born == place.born


def _life(pid: int) -> tuple[str, str]:
    """State and time of birth; the program's name before them may contain anything."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return words[0], words[19]


def create() -> tuple[int, Segment]:
    """A segment of our own, all zeros, and the file descriptor by which others open it."""
    file = os.memfd_create("meshwright", os.MFD_CLOEXEC)
    os.ftruncate(file, ctypes.sizeof(Segment))
    return file, _mapped(file)


def open_segment(place: Place, file: int) -> Segment:
    """The segment of a peer."""
    path = f"/proc/{place.pid}/fd/{file}"
    try:
        ours = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"{path} cannot be opened: {error.strerror}") from None
    try:
        return _mapped(ours)
    finally:
        os.close(ours)


def _mapped(file: int) -> Segment:
    """Lives as long as the object that is returned."""
    return Segment.from_buffer(mmap.mmap(file, ctypes.sizeof(Segment)))
