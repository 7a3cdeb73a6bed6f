"""Builds and runs the programs of this folder, which include the C files of the package, with a sanitizer of gcc."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from meshwright.collectives import shared_memory
from meshwright.files.compiled import FLAGS
from meshwright.processes import network

_HERE = Path(__file__).parent
EXCHANGES = Path(shared_memory.__path__[0])
ACCEPTS = Path(network.__path__[0])
_FLAGS = [flag for flag in FLAGS if flag.startswith(("-std", "-f")) and flag != "-fPIC"]
# gcc says that the sanitizer of threads does not know `fence`, which only ranks without the compiled steps call.
_FLAGS += ["-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-Wall", "-Werror", "-Wno-tsan"]
# As `-fsanitize=...`; the program of "none" is as optimized as the one that ranks load.
SANITIZERS = {
    "none": ["-O3", "-march=native"],
    "thread": ["-O1", "-fsanitize=thread"],
    "address": ["-O1", "-fsanitize=address,undefined"],
}
NO_FP16 = "-U__FLT16_MANT_DIG__"  # as compilers before gcc 12
_LIMIT_S = 1200


def missing() -> str | None:
    """Returns why nothing can be built; None if it can."""
    if shutil.which("gcc") is None:
        return "there is no gcc"
    test = ["gcc", "-fsanitize=thread", "-x", "c", "-", "-o", "/dev/null"]
    run = subprocess.run(test, input="int main(void) { return 0; }", capture_output=True, text=True, check=False)
    return "gcc has no sanitizer of threads" if run.returncode else None


def build(name: str, sanitizer: str, folder: Path, sources: Path, more: Sequence[str] = ()) -> Path:
    """Returns the program. `sources` has the files of the package that it includes."""
    program = folder / name
    flags = [*_FLAGS, *SANITIZERS[sanitizer], f"-I{sources}", *more]
    subprocess.run(["gcc", *flags, _HERE / f"{name}.c", *_libraries(name, folder), "-o", program], check=True)
    return program


def _libraries(name: str, folder: Path) -> list[str]:
    if name != "accept":
        return ["-lpthread"]
    library = folder / "libtorch_cpu.so"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-z,lazy", str(_HERE / "torch_stand_in.c"), "-o", str(library)]
    subprocess.run(command, check=True)
    return [str(library), f"-Wl,-rpath,{folder}", "-lpthread"]


def run(program: Path, *words: object) -> "subprocess.CompletedProcess[str]":
    command = [str(program), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)


def changed(sources: Path, file: str, before: str, after: str, folder: Path) -> Path:
    """Returns a folder with the sources, of which one has been changed."""
    copy = folder / "changed"
    shutil.copytree(sources, copy, ignore=lambda _, names: [name for name in names if not name.endswith((".c", ".h"))])
    text = (copy / file).read_text()
    assert before in text
    (copy / file).write_text(text.replace(before, after))
    return copy
