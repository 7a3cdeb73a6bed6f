"""The cache folder, and folders in it that one process fills for all."""

import errno
import os
from multiprocessing import get_context
from pathlib import Path

import pytest

from meshwright.files.cache import cache_folder, fill_once


def test_the_cache_folder_follows_the_xdg_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "meshwright"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "meshwright"


def _make(folder: Path) -> None:
    (folder / str(os.getpid())).write_text("made")


def _names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in fill_once(folder, _make).iterdir())


def test_one_of_many_processes_fills_the_folder(tmp_path: Path) -> None:
    with get_context("spawn").Pool(4) as pool:
        names = pool.map(_names_in, [tmp_path / "kept" / "data"] * 8)
    assert len(names[0]) == 1
    assert names == [names[0]] * 8


def test_a_failure_leaves_no_folder_and_the_next_call_tries_again(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fill_once(tmp_path / "data", fail)
    assert not [file for file in tmp_path.iterdir() if not file.name.endswith(".lock")]
    assert _names_in(tmp_path / "data") == [str(os.getpid())]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_cache_that_cannot_take_the_files_costs_only_time(tmp_path: Path, number: int) -> None:
    folders: list[Path] = []

    def make(folder: Path) -> None:
        folders.append(folder)
        (folder / "data").write_text("made")
        if folder.parent == tmp_path:
            raise OSError(number, os.strerror(number))

    with pytest.warns(UserWarning, match="until then these files are made in every run"):
        folder = fill_once(tmp_path / "data", make)
    assert (folder / "data").read_text() == "made"
    assert fill_once(tmp_path / "data", make) == folder  # nothing is made again
    assert [made.parent for made in folders] == [tmp_path, folder.parent]
    assert not [file for file in tmp_path.iterdir() if not file.name.endswith(".lock")]
