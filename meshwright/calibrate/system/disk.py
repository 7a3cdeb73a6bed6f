"""The disk of the folder in which runs are stored: what it is, how much space it has, and how fast it writes."""

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.files.storage import disk_of
from meshwright.numbers.units import bandwidth_text, bytes_text

SMALLEST_FREE_BYTES = 2 * 10**9  # a few checkpoints of a small model
SLOWEST_BYTES_PER_S = 50e6  # a checkpoint of 1 GB takes 20 s
_WRITTEN_BYTES = 2**26
_BLOCK_BYTES = 2**22
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class OutputDisk:
    """The disk of the folder of runs. `bytes_per_s` is how fast a new file was written and synchronized; None if it
    could not be written, because of `problem`."""

    folder: str
    mount_point: str
    kind: str
    free_bytes: int
    bytes_per_s: float | None
    problem: str = ""


def inspect_disk(folder: Path) -> OutputDisk:
    """Inspects the disk of a folder of runs. A file of 64 MiB is written there, or less if there is little space, and
    deleted again. If the folder does not exist yet, the file is written to the nearest folder that does."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    disk = disk_of(existing)
    speed, problem = None, ""
    try:
        speed = _write_speed(existing, min(_WRITTEN_BYTES, disk.free_bytes // 10))
    except OSError as error:
        problem = error.strerror or str(error)
    return OutputDisk(str(folder), disk.mount_point, disk.kind, disk.free_bytes, speed, problem)


def disk_problems(disk: OutputDisk) -> Iterator[str]:
    """Yields one line for each problem of the disk."""
    what = f"the folder of runs, {disk.folder}, is on the disk mounted at {disk.mount_point} ({disk.kind or 'unknown'})"
    if disk.problem:
        yield f"{what}, which cannot be written: {disk.problem}; set the job's output to a folder of yours"
    if disk.kind in _IN_MEMORY:
        yield f"{what}: checkpoints there are lost when the machine restarts, and take memory; choose another output"
    elif disk.free_bytes < SMALLEST_FREE_BYTES:
        yield f"{what}, which has {bytes_text(disk.free_bytes)} free: free some space, or choose another output"
    if disk.bytes_per_s is not None and disk.bytes_per_s < SLOWEST_BYTES_PER_S:
        yield (
            f"{what}, which writes {bandwidth_text(disk.bytes_per_s)}: checkpoints take long; choose a"
            " local disk as output, or save less often (checkpoint.every_steps)"
        )


def _write_speed(folder: Path, size: int) -> float | None:
    """Bytes per second of writing a file of random bytes, which no file system can compress; None for no bytes."""
    blocks = size // _BLOCK_BYTES
    if not blocks:
        return None
    block = os.urandom(_BLOCK_BYTES)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        begin = time.perf_counter()
        for _ in range(blocks):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return blocks * _BLOCK_BYTES / (time.perf_counter() - begin)
