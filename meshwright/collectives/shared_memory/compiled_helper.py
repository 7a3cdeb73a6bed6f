"""Compiles and loads `shared_memory.c`, which has the memory barriers between the writes of one rank and the reads of
another. Without the compiled file, shared memory works only on processors that keep the order of writes.

The compiled file is stored in the user's cache folder. Its name contains a hash of everything that affects the
compilation.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from meshwright.collectives.shared_memory.segment import SharedSegment
from meshwright.files.cache import cache_folder

SOURCE = Path(__file__).with_name("shared_memory.c")
INCLUDED = Path(__file__).with_name("sums.h")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-shared", "-fPIC")
TOTAL_STORE_ORDER = ("x86_64", "AMD64", "i686")  # processors on which writes become visible in program order
COMPILE_S = 120


@cache
def load_helper(folder: Path | None = None, path: str | None = None) -> ctypes.CDLL | str:
    """Returns the loaded library of `shared_memory.c`, or a string with the reason why there is none. `folder` is where
    compiled files are stored (None: the user's cache folder). `path` is searched for compilers (None: PATH)."""
    reasons: list[str] = []
    for name in COMPILERS:
        compiler = shutil.which(name, path=path)
        if compiler is None:
            continue
        library = _compiled(compiler, folder or cache_folder())
        if not isinstance(library, str):
            return library
        reasons.append(library)
    return "; ".join(reasons) or f"there is no C compiler ({', '.join(COMPILERS)})"


def has_total_store_order(machine: str | None = None) -> bool:
    """Whether the processor makes writes visible in program order, so that ranks can share memory without barriers.
    `machine` is an architecture as `platform.machine()` names it (None: this machine's)."""
    return (machine or platform.machine()) in TOTAL_STORE_ORDER


def _compiled(compiler: str, folder: Path) -> ctypes.CDLL | str:
    """Returns the loaded library, or a string with the reason why it could not be compiled or loaded. Each rank
    compiles into a folder of its own and renames the file atomically, because many ranks may compile at the same
    time."""
    try:
        file = folder / f"shared_memory-{_key(compiler)}.so"
        if file.exists() and _is_private(file) and isinstance(library := _loaded(file), ctypes.CDLL):
            return library
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".compile-") as draft_folder:
            draft = Path(draft_folder) / "shared_memory.so"
            if problem := _compile(compiler, draft):
                return problem
            if isinstance(library := _loaded(draft), str):
                return library
            draft.chmod(0o755)
            draft.replace(file)
            return library
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compiler}: {error}"


def _compile(compiler: str, output: Path) -> str | None:
    """Returns the error message of the compiler; None if it succeeded."""
    message = ""
    for machine in (("-march=native",), ()):  # not every compiler knows the processor it runs on
        command = [compiler, *FLAGS, *machine, "-o", str(output), str(SOURCE)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
        if run.returncode == 0:
            return None
        message = (run.stderr or run.stdout).strip().splitlines()[0] if run.stderr or run.stdout else "it failed"
    return f"{compiler}: {message}"


def _is_private(file: Path) -> bool:
    """Whether only this user or root can have written the file, whose code is executed when it is loaded."""
    status = file.stat()
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o022


def _loaded(file: Path) -> ctypes.CDLL | str:
    try:
        library = ctypes.CDLL(str(file))
        library.segment_bytes.restype = ctypes.c_int64
        segment_bytes = library.segment_bytes()
    except (OSError, AttributeError) as error:
        return str(error)
    if segment_bytes != ctypes.sizeof(SharedSegment):
        return f"{file} has segments of {segment_bytes} bytes, Python of {ctypes.sizeof(SharedSegment)}"
    return library


def _key(compiler: str) -> str:
    """Returns a hash of sources, compiler, flags and processor. The processor counts because machines of several kinds
    may share a home folder."""
    run = subprocess.run([compiler, "--version"], capture_output=True, timeout=COMPILE_S, check=False)
    parts = [SOURCE.read_bytes(), INCLUDED.read_bytes(), compiler.encode(), run.stdout]
    parts += [" ".join(FLAGS).encode(), platform.machine().encode()]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kinds = ("flags", "features", "cpu part", "cpu family", "model name", "cpu implementer", "cpu variant")
    parts += sorted({line.lower().encode() for line in lines if line.lower().startswith(kinds)})
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
