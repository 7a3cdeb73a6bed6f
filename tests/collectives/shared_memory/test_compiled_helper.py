"""The helper is compiled once, by the first rank that needs it. Where it cannot be compiled, the reason is
returned."""

import ctypes
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.collectives.shared_memory import compiled_helper
from meshwright.collectives.shared_memory.reducer import SharedMemoryReducer
from meshwright.collectives.shared_memory.segment import SharedSegment
from meshwright.errors import InputError
from meshwright.files import compiled
from tests.collectives.world_group import world_group
from tests.ranks import RankPool


@pytest.fixture
def empty_cache() -> None:
    compiled_helper.load_helper.cache_clear()


def _script(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.mark.usefixtures("empty_cache")
def test_the_helper_is_compiled_once_and_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a" / "b"
    library = compiled_helper.load_helper(folder)
    assert isinstance(library, ctypes.CDLL)
    assert library.segment_bytes() == ctypes.sizeof(SharedSegment)
    (file,) = folder.iterdir()
    compiled_at = file.stat().st_mtime_ns
    compiled_helper.load_helper.cache_clear()
    monkeypatch.setattr(compiled, "_compile", lambda source, compiler, output: pytest.fail("it was compiled again"))
    assert isinstance(compiled_helper.load_helper(folder), ctypes.CDLL)
    assert file.stat().st_mtime_ns == compiled_at
    assert compiled.is_private(file)


@pytest.mark.usefixtures("empty_cache")
def test_a_file_that_others_can_write_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiled.shutil.which("cc")
    assert compiler is not None
    file = compiled.compiled_file(compiled_helper.SOURCE, compiler, tmp_path)
    file.write_text("of somebody else")
    file.chmod(0o666)
    loaded: list[Path] = []
    monkeypatch.setattr(compiled, "COMPILERS", ("cc",))
    monkeypatch.setattr(compiled, "_compile", lambda source, compiler, output: "it was compiled again")
    monkeypatch.setattr(compiled, "_loaded", lambda source, file: loaded.append(file))
    assert compiled_helper.load_helper(tmp_path) == "it was compiled again"
    assert loaded == []


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.soak
def test_a_damaged_file_is_compiled_again(tmp_path: Path) -> None:
    compiler = compiled.shutil.which("cc")
    assert compiler is not None
    file = compiled.compiled_file(compiled_helper.SOURCE, compiler, tmp_path)
    file.write_text("damaged")
    assert isinstance(compiled_helper.load_helper(tmp_path), ctypes.CDLL)
    assert file.read_bytes()[:4] == b"\x7fELF"


def test_another_source_compiler_or_processor_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _script(tmp_path / "cc", "echo 1.0")
    _script(tmp_path / "gcc", "echo 1.0")
    keys = [
        compiled._key(compiled_helper.SOURCE, str(tmp_path / "cc")),
        compiled._key(compiled_helper.SOURCE, str(tmp_path / "gcc")),
    ]
    _script(tmp_path / "cc", "echo 1.1")
    keys.append(compiled._key(compiled_helper.SOURCE, str(tmp_path / "cc")))
    monkeypatch.setattr(compiled.platform, "machine", lambda: "riscv64")
    keys.append(compiled._key(compiled_helper.SOURCE, str(tmp_path / "cc")))
    (tmp_path / "other.c").write_text("int x;")
    other = tmp_path / "other.c"
    for source in (replace(compiled_helper.SOURCE, file=other), replace(compiled_helper.SOURCE, included=(other,))):
        monkeypatch.setattr(compiled_helper, "SOURCE", source)
        keys.append(compiled._key(compiled_helper.SOURCE, str(tmp_path / "cc")))
    assert len(set(keys)) == 6


@pytest.mark.soak
def test_concurrent_compilations_leave_one_valid_file(tmp_path: Path) -> None:
    compiler = compiled.shutil.which("cc")
    assert compiler is not None
    with ThreadPoolExecutor(3) as pool:
        libraries = list(pool.map(lambda _: compiled.compiled(compiled_helper.SOURCE, compiler, tmp_path), range(3)))
    assert all(isinstance(library, ctypes.CDLL) for library in libraries)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "there is no C compiler (cc, gcc, clang)"),
        ("echo it is broken >&2; exit 1", "cc: it is broken"),
        ("exit 0", "cannot open shared object file"),
        ('while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"', "shared_memory.so"),
    ],
)
def test_without_a_working_compiler_the_reason_is_returned(tmp_path: Path, text: str | None, reason: str) -> None:
    (tmp_path / "bin").mkdir()
    if text is not None:
        _script(tmp_path / "bin" / "cc", text)
    result = compiled_helper.load_helper(tmp_path / "cache", str(tmp_path / "bin"))
    assert isinstance(result, str)
    assert reason in result


@pytest.mark.usefixtures("empty_cache")
def test_a_compiler_that_does_not_know_the_processor_is_called_without_march_native(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    real = compiled.shutil.which("cc")
    refuse = 'for a in "$@"; do if [ "$a" = -march=native ]; then exit 1; fi; done'
    _script(tmp_path / "bin" / "cc", f'{refuse}\nexec {real} "$@"')
    assert isinstance(compiled_helper.load_helper(tmp_path / "cache", str(tmp_path / "bin")), ctypes.CDLL)


@pytest.mark.usefixtures("empty_cache")
def test_a_folder_that_cannot_be_written_is_named_as_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = compiled_helper.load_helper(tmp_path / "file" / "folder")
    assert isinstance(result, str)
    assert "Not a directory" in result


def test_which_processors_keep_the_order_of_writes() -> None:
    assert compiled_helper.has_total_store_order("x86_64")
    assert not compiled_helper.has_total_store_order("aarch64")
    assert compiled_helper.has_total_store_order() == (os.uname().machine == "x86_64")


def _without_a_compiler(rank: int, world: int, machine: str, only_on: int | None) -> str:
    """Returns the name of the class of the reducer's steps, or its error, on a machine with this processor. All ranks,
    or only one, have no compiler."""
    real_helper, real_platform = compiled_helper.load_helper, compiled_helper.platform
    if only_on in (None, rank):
        compiled_helper.load_helper = lambda folder=None: "there is no C compiler"  # type: ignore[assignment]
    compiled_helper.platform = SimpleNamespace(machine=lambda: machine)  # type: ignore[assignment]
    try:
        reducer = SharedMemoryReducer(world_group())
    except InputError as error:
        return str(error)
    finally:
        compiled_helper.load_helper, compiled_helper.platform = real_helper, real_platform
    steps = type(reducer._steps).__name__
    reducer.close()
    return steps


def test_without_a_compiler_a_processor_that_reorders_writes_is_refused_on_all_ranks(two: RankPool) -> None:
    for only_on in (None, 1):
        for message in two.run(_without_a_compiler, "aarch64", only_on):
            assert "this processor reorders writes, and no helper was compiled: there is no C compiler" in message


def test_without_a_compiler_on_one_rank_all_ranks_use_python_where_order_is_kept(two: RankPool) -> None:
    assert two.run(_without_a_compiler, "x86_64", 1) == ["PythonSteps", "PythonSteps"]
    assert two.run(_without_a_compiler, "x86_64", None) == ["PythonSteps", "PythonSteps"]
