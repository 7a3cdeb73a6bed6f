"""The compiled helper: made once, by whoever comes first, and never a reason to fail."""

import ctypes
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from meshwright.collectives.shared_memory import fences
from meshwright.collectives.shared_memory.reducer import SharedMemory
from meshwright.collectives.shared_memory.segment import Segment
from meshwright.errors import InputError
from tests.ranks import RankPool


@pytest.fixture
def fresh() -> None:
    fences.helper.cache_clear()


def _script(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.mark.usefixtures("fresh")
def test_it_is_compiled_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a" / "b"
    found = fences.helper(folder)
    assert isinstance(found, ctypes.CDLL)
    assert found.segment_bytes() == ctypes.sizeof(Segment)
    (file,) = folder.iterdir()
    made = file.stat().st_mtime_ns
    fences.helper.cache_clear()
    monkeypatch.setattr(fences, "_compile", lambda compiler, made: pytest.fail("it was compiled again"))
    assert isinstance(fences.helper(folder), ctypes.CDLL)
    assert file.stat().st_mtime_ns == made


@pytest.mark.usefixtures("fresh")
@pytest.mark.soak
def test_a_damaged_file_is_made_anew(tmp_path: Path) -> None:
    compiler = fences.shutil.which("cc")
    assert compiler is not None
    file = tmp_path / f"shared_memory-{fences._key(compiler)}.so"
    file.write_text("damaged")
    assert isinstance(fences.helper(tmp_path), ctypes.CDLL)
    assert file.read_bytes()[:4] == b"\x7fELF"


def test_another_source_compiler_or_processor_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _script(tmp_path / "cc", "echo 1.0")
    _script(tmp_path / "gcc", "echo 1.0")
    keys = [fences._key(str(tmp_path / "cc")), fences._key(str(tmp_path / "gcc"))]
    _script(tmp_path / "cc", "echo 1.1")
    keys.append(fences._key(str(tmp_path / "cc")))
    monkeypatch.setattr(fences.platform, "machine", lambda: "riscv64")
    keys.append(fences._key(str(tmp_path / "cc")))
    (tmp_path / "other.c").write_text("int x;")
    for name in ("SOURCE", "INCLUDED"):
        monkeypatch.setattr(fences, name, tmp_path / "other.c")
        keys.append(fences._key(str(tmp_path / "cc")))
    assert len(set(keys)) == 6


@pytest.mark.soak
def test_many_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    compiler = fences.shutil.which("cc")
    assert compiler is not None
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: fences._compiled(compiler, tmp_path), range(3)))
    assert all(isinstance(each, ctypes.CDLL) for each in found)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "there is no C compiler (cc, gcc, clang)"),
        ("echo it is broken >&2; exit 1", "cc: it is broken"),
        ("exit 0", "cannot open shared object file"),
        ('while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"', "shared_memory.so"),
    ],
)
def test_without_a_compiler_that_works_there_is_a_reason(tmp_path: Path, text: str | None, reason: str) -> None:
    (tmp_path / "bin").mkdir()
    if text is not None:
        _script(tmp_path / "bin" / "cc", text)
    found = fences.helper(tmp_path / "cache", str(tmp_path / "bin"))
    assert isinstance(found, str)
    assert reason in found


@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_does_not_know_the_processor_is_asked_again(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    real = fences.shutil.which("cc")
    refuse = 'for a in "$@"; do if [ "$a" = -march=native ]; then exit 1; fi; done'
    _script(tmp_path / "bin" / "cc", f'{refuse}\nexec {real} "$@"')
    assert isinstance(fences.helper(tmp_path / "cache", str(tmp_path / "bin")), ctypes.CDLL)


@pytest.mark.usefixtures("fresh")
def test_a_folder_that_cannot_be_written_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = fences.helper(tmp_path / "file" / "folder")
    assert isinstance(found, str)
    assert "Not a directory" in found


def test_which_processors_keep_order() -> None:
    assert fences.keeps_order("x86_64")
    assert not fences.keeps_order("aarch64")
    assert fences.keeps_order() == (os.uname().machine == "x86_64")


def _without_a_compiler(rank: int, world: int, machine: str, only: int | None) -> str:
    """What a rank does when there is no compiler (on all ranks, or on one) and it runs on such a machine."""
    real_helper, real_platform = fences.helper, fences.platform
    if only in (None, rank):
        fences.helper = lambda folder=None: "there is no C compiler"  # type: ignore[assignment]
    fences.platform = SimpleNamespace(machine=lambda: machine)  # type: ignore[assignment]
    group = dist.group.WORLD
    assert group is not None
    try:
        reducer = SharedMemory(group)
    except InputError as error:
        return str(error)
    finally:
        fences.helper, fences.platform = real_helper, real_platform
    kind = type(reducer._steps).__name__
    reducer.close()
    return kind


def test_without_a_compiler_a_processor_that_reorders_writes_is_refused_on_all_ranks(two: RankPool) -> None:
    for only in (None, 1):
        for said in two.run(_without_a_compiler, "aarch64", only):
            assert "this processor reorders writes, and no helper was compiled: there is no C compiler" in said


def test_without_a_compiler_on_one_rank_all_ranks_take_plain_python_where_order_is_kept(two: RankPool) -> None:
    assert two.run(_without_a_compiler, "x86_64", 1) == ["Plain", "Plain"]
    assert two.run(_without_a_compiler, "x86_64", None) == ["Plain", "Plain"]
