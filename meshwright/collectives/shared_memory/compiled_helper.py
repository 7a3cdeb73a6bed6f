"""Compiles and loads `shared_memory.c`, which has the memory barriers between the writes of one rank and the reads of
another. Without the compiled file, shared memory works only on processors that keep the order of writes."""

import ctypes
import platform
from functools import cache
from pathlib import Path

from meshwright.collectives.shared_memory.segment import SharedSegment
from meshwright.files import compiled

TOTAL_STORE_ORDER = ("x86_64", "AMD64", "i686")  # processors on which writes become visible in program order


def _check(library: ctypes.CDLL) -> str | None:
    library.segment_bytes.restype = ctypes.c_int64
    there, here = library.segment_bytes(), ctypes.sizeof(SharedSegment)
    return None if there == here else f"has segments of {there} bytes, Python of {here}"


SOURCE = compiled.Source(
    Path(__file__).with_name("shared_memory.c"), (Path(__file__).with_name("sums.h"),), check=_check
)


@cache
def load_helper(folder: Path | None = None, path: str | None = None) -> ctypes.CDLL | str:
    """Returns the loaded library of `shared_memory.c`, or a string with the reason why there is none. `folder` is where
    compiled files are stored (None: the user's cache folder). `path` is searched for compilers (None: PATH)."""
    return compiled.load(SOURCE, folder, path)


def has_total_store_order(machine: str | None = None) -> bool:
    """Whether the processor makes writes visible in program order, so that ranks can share memory without barriers.
    `machine` is an architecture as `platform.machine()` names it (None: this machine's)."""
    return (machine or platform.machine()) in TOTAL_STORE_ORDER
