"""Compiles and loads C files of this package. A compiled file is stored in the user's cache folder; its name contains a
hash of everything that affects the compilation."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright.files.cache import cache_folder

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-shared", "-fPIC")
COMPILE_S = 120


@dataclass(frozen=True)
class Source:
    """A C file and the files that it includes. `check` returns why a library that was loaded cannot be used, or None;
    it raises AttributeError if the library lacks a function."""

    file: Path
    included: tuple[Path, ...]
    check: Callable[[ctypes.CDLL], str | None]


def load(source: Source, folder: Path | None = None, path: str | None = None) -> ctypes.CDLL | str:
    """Returns the loaded library, or a string with the reason why there is none. `folder` is where compiled files are
    stored (None: the user's cache folder). `path` is searched for compilers (None: PATH)."""
    reasons: list[str] = []
    for name in COMPILERS:
        compiler = shutil.which(name, path=path)
        if compiler is None:
            continue
        library = compiled(source, compiler, folder or cache_folder())
        if not isinstance(library, str):
            return library
        reasons.append(library)
    return "; ".join(reasons) or f"there is no C compiler ({', '.join(COMPILERS)})"


def compiled(source: Source, compiler: str, folder: Path) -> ctypes.CDLL | str:
    """Returns the loaded library, or a string with the reason why it could not be compiled or loaded. Each rank
    compiles into a folder of its own and renames the file atomically, because many ranks may compile at the same
    time."""
    try:
        file = compiled_file(source, compiler, folder)
        if file.exists() and is_private(file) and isinstance(library := _loaded(source, file), ctypes.CDLL):
            return library
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".compile-") as draft_folder:
            draft = Path(draft_folder, source.file.name).with_suffix(".so")
            if problem := _compile(source, compiler, draft):
                return problem
            if isinstance(library := _loaded(source, draft), str):
                return library
            draft.chmod(0o755)
            draft.replace(file)
            return library
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compiler}: {error}"


def compiled_file(source: Source, compiler: str, folder: Path) -> Path:
    return folder / f"{source.file.stem}-{_key(source, compiler)}.so"


def is_private(file: Path) -> bool:
    """Whether only this user or root can have written the file, whose code is executed when it is loaded."""
    status = file.stat()
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o022


def _compile(source: Source, compiler: str, output: Path) -> str | None:
    """Returns the error message of the compiler; None if it succeeded."""
    message = ""
    for machine in (("-march=native",), ()):  # not every compiler knows the processor it runs on
        command = [compiler, *FLAGS, *machine, "-o", str(output), str(source.file)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
        if run.returncode == 0:
            return None
        message = (run.stderr or run.stdout).strip().splitlines()[0] if run.stderr or run.stdout else "it failed"
    return f"{compiler}: {message}"


def _loaded(source: Source, file: Path) -> ctypes.CDLL | str:
    try:
        library = ctypes.CDLL(str(file), use_errno=True)
        problem = source.check(library)
    except (OSError, AttributeError) as error:
        return str(error)
    return f"{file} {problem}" if problem else library


def _key(source: Source, compiler: str) -> str:
    """Returns a hash of sources, compiler, flags and processor. The processor counts because machines of several kinds
    may share a home folder."""
    run = subprocess.run([compiler, "--version"], capture_output=True, timeout=COMPILE_S, check=False)
    parts = [file.read_bytes() for file in (source.file, *source.included)]
    parts += [compiler.encode(), run.stdout, " ".join(FLAGS).encode(), platform.machine().encode()]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kinds = ("flags", "features", "cpu part", "cpu family", "model name", "cpu implementer", "cpu variant")
    parts += sorted({line.lower().encode() for line in lines if line.lower().startswith(kinds)})
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
