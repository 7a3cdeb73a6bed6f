"""Whether this machine can order what one rank writes and another reads: with a helper that is compiled once, or,
where the processor keeps the order by itself, without.

The compiled file lies in the user's cache folder under a name made of everything that would make it another file.
"""

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from meshwright.cache import cache_folder
from meshwright.collectives.shared_memory.segment import Segment

SOURCE = Path(__file__).with_name("shared_memory.c")
INCLUDED = Path(__file__).with_name("sums.h")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-shared", "-fPIC")
KEEPS_ORDER = ("x86_64", "AMD64", "i686")  # total store order: writes are seen in the order they were made in
COMPILE_S = 120


@cache
def helper(folder: Path | None = None, path: str | None = None) -> ctypes.CDLL | str:
    """The compiled `shared_memory.c`, or why there is none. `folder` keeps what was compiled; compilers are looked for
    on `path`, which is the usual one where None is given."""
    reasons: list[str] = []
    for name in COMPILERS:
        compiler = shutil.which(name, path=path)
        if compiler is None:
            continue
        found = _compiled(compiler, folder or cache_folder())
        if not isinstance(found, str):
            return found
        reasons.append(found)
    return "; ".join(reasons) or f"there is no C compiler ({', '.join(COMPILERS)})"


def keeps_order(machine: str | None = None) -> bool:
    """Whether plain reads and writes are enough on this processor."""
    return (machine or platform.machine()) in KEEPS_ORDER


def _compiled(compiler: str, folder: Path) -> ctypes.CDLL | str:
    """Whole or not at all: many ranks may compile it at once, and each renames a file of its own."""
    try:
        file = folder / f"shared_memory-{_key(compiler)}.so"
        if file.exists() and isinstance(found := _loaded(file), ctypes.CDLL):
            return found
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".compile-") as aside:
            made = Path(aside) / "shared_memory.so"
            if problem := _compile(compiler, made):
                return problem
            if isinstance(found := _loaded(made), str):
                return found
            made.replace(file)
            return found
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compiler}: {error}"


def _compile(compiler: str, made: Path) -> str | None:
    said = ""
    for machine in (("-march=native",), ()):  # not every compiler knows the processor it runs on
        command = [compiler, *FLAGS, *machine, "-o", str(made), str(SOURCE)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
        if run.returncode == 0:
            return None
        said = (run.stderr or run.stdout).strip().splitlines()[0] if run.stderr or run.stdout else "it failed"
    return f"{compiler}: {said}"


def _loaded(file: Path) -> ctypes.CDLL | str:
    try:
        found = ctypes.CDLL(str(file))
        found.segment_bytes.restype = ctypes.c_int64
        bytes_ = found.segment_bytes()
    except (OSError, AttributeError) as error:
        return str(error)
    if bytes_ != ctypes.sizeof(Segment):
        return f"{file} has segments of {bytes_} bytes, Python of {ctypes.sizeof(Segment)}"
    return found


def _key(compiler: str) -> str:
    """The processor's own words count too: a home folder may be shared by machines of several kinds."""
    run = subprocess.run([compiler, "--version"], capture_output=True, timeout=COMPILE_S, check=False)
    parts = [SOURCE.read_bytes(), INCLUDED.read_bytes(), compiler.encode(), run.stdout]
    parts += [" ".join(FLAGS).encode(), platform.machine().encode()]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kinds = ("flags", "features", "cpu part", "cpu family", "model name", "cpu implementer", "cpu variant")
    parts += sorted({line.lower().encode() for line in lines if line.lower().startswith(kinds)})
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
