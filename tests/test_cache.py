"""The cache folder, and what is made in it once."""

import os
from multiprocessing import get_context
from pathlib import Path

import pytest

from meshwright.cache import cache_folder, made_once


def test_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "meshwright"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "meshwright"


def _make(folder: Path) -> None:
    (folder / str(os.getpid())).write_text("made")


def _ask(folder: Path) -> list[str]:
    return sorted(file.name for file in made_once(folder, _make).iterdir())


def test_of_many_processes_one_makes_it(tmp_path: Path) -> None:
    with get_context("spawn").Pool(4) as pool:
        found = pool.map(_ask, [tmp_path / "kept" / "data"] * 8)
    assert len(found[0]) == 1
    assert found == [found[0]] * 8


def test_what_fails_leaves_nothing_and_is_tried_again(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        made_once(tmp_path / "data", fail)
    assert not [file for file in tmp_path.iterdir() if not file.name.endswith(".lock")]
    assert _ask(tmp_path / "data") == [str(os.getpid())]
