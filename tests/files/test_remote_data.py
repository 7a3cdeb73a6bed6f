"""Data sets at URLs are downloaded to the cache once, and again when they change."""

from pathlib import Path

import pytest

from meshwright.errors import InputError, RemoteStorageError
from meshwright.files.remote import RemoteFolder, open_remote
from meshwright.files.remote_data import local_root
from meshwright.train.build import build_data
from tests.train.one_process import toy_job


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_a_folder_is_downloaded_once_and_again_when_it_changes(
    tmp_path: Path, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    remote = open_remote(f"{protocol}://{tmp_path}/store/digits", "test")
    remote.write("a.txt", b"first")
    remote.child("inner").write("b.txt", b"second")
    folder = Path(local_root(remote.url))
    assert folder.parent == tmp_path / "cache" / "meshwright" / "data"
    assert {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.txt")} == {
        "a.txt": b"first",
        "inner/b.txt": b"second",
    }
    monkeypatch.setattr(RemoteFolder, "download", None)  # the second time, nothing is downloaded
    assert local_root(remote.url) == str(folder)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    remote.write("a.txt", b"another")
    assert (Path(local_root(remote.url)) / "a.txt").read_bytes() == b"another"
    assert local_root("/a/folder") == "/a/folder"


def test_names_that_lead_elsewhere_and_empty_folders_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"data.root: there are no files in memory://"):
        local_root(f"memory://{tmp_path}/nothing")
    for name in ("../escaped", "/escaped", "a/../../escaped", ""):
        monkeypatch.setattr(RemoteFolder, "files", lambda _, name=name: {name: (1, "")})
        with pytest.raises(InputError, match="which no folder can have"):
            local_root(f"memory://{tmp_path}/crafted")


def test_a_store_that_fails_leaves_nothing_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    remote = open_remote(f"memory://{tmp_path}/store", "test")
    remote.write("a.txt", b"first")
    download, calls = RemoteFolder.download, []

    def gone(*_: object) -> None:
        calls.append(1)
        raise RemoteStorageError("the bucket is gone")

    monkeypatch.setattr(RemoteFolder, "download", gone)
    with pytest.raises(RemoteStorageError, match="the bucket is gone"):
        local_root(remote.url)
    assert len(calls) == 1
    monkeypatch.setattr(RemoteFolder, "download", download)
    assert (Path(local_root(remote.url)) / "a.txt").read_bytes() == b"first"


class Rows(list[int]):
    def __init__(self, root: str) -> None:
        super().__init__(int(line) for line in (Path(root) / "rows.txt").read_text().split())


def test_a_job_reads_its_data_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    open_remote(f"memory://{tmp_path}/store", "test").write("rows.txt", b"1 2 3")
    job = toy_job(data={"train": {"call": "tests.files.test_remote_data:Rows"}, "root": f"memory://{tmp_path}/store"})
    assert build_data(job)[0] == [1, 2, 3]
    with pytest.raises(InputError, match=r"data.root: the URL has a user or password"):
        toy_job(data={"root": "s3://user:hunter2@bucket"})
