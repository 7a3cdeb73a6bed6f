"""Folders at URLs: which URLs are refused, and that a wrong or unreachable one ends in one line."""

import hashlib
import sys
from pathlib import Path

import pytest

from meshwright.errors import InputError, RemoteStorageError
from meshwright.files.remote import check_url, is_url, open_remote


@pytest.mark.parametrize(
    ("url", "checked"),
    [
        ("s3://bucket/folder//", "s3://bucket/folder"),
        ("S3://Bucket", "s3://Bucket"),
        ("file:///tmp/a b", "file:///tmp/a b"),
        ("hf://datasets/user/repository@branch/folder", "hf://datasets/user/repository@branch/folder"),
        ("sftp://host:22/folder", "sftp://host:22/folder"),
    ],
)
def test_urls_of_folders_are_accepted(url: str, checked: str) -> None:
    assert is_url(url)
    assert check_url(url) == checked


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("bucket/folder", "is not a URL"),
        ("s3://", "names no folder"),
        ("file:///", "names no folder"),
        ("s3://user:hunter2@bucket/folder", "user or password"),
        ("s3://hunter2@bucket/folder", "user or password"),
        ("s3://user:hun/ter2@bucket/folder", "user or password"),
        ("s3://user:hunter2", "user or password"),
        ("https://host/folder?token=hunter2", "contains '?'"),
        ("simplecache::s3://bucket", "is not a URL"),
        ("s3://bucket::zip://hunter2", "user or password"),
        ("s3://bucket/../other", "without '.' and '..'"),
        ("s3://bucket/a\nb", "control characters"),
    ],
)
def test_other_urls_are_refused_without_showing_passwords(url: str, problem: str) -> None:
    with pytest.raises(ValueError) as refused:
        check_url(url)
    assert problem in str(refused.value)
    assert "hunter2" not in str(refused.value)
    assert "ter2" not in str(refused.value)


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_objects_are_written_read_and_deleted(tmp_path: Path, protocol: str) -> None:
    folder = open_remote(f"{protocol}://{tmp_path}/store", "field").child("run")
    assert folder.names() == []
    assert folder.read("a.json", 10) is None
    assert folder.size("a.json") is None
    source = tmp_path / "source"
    source.write_bytes(b"x" * 100)
    written: list[int] = []
    assert folder.upload(source, "b.bin", written.append) == (100, hashlib.sha256(b"x" * 100).hexdigest())
    folder.write("a.json", b"first")
    folder.write("a.json", b"second")
    assert written == [100]
    assert folder.names() == ["a.json", "b.bin"]
    assert (folder.read("a.json", 10), folder.read("a.json", 3)) == (b"second", b"seco")
    assert folder.size("b.bin") == 100
    assert folder.download("b.bin", tmp_path / "target", 100) == (100, hashlib.sha256(b"x" * 100).hexdigest())
    assert folder.download("c.bin", tmp_path / "other", 100) is None
    folder.delete("a.json")
    folder.delete("a.json")
    assert folder.names() == ["b.bin"]
    folder.delete_all()
    folder.delete_all()
    assert folder.names() == []


def test_a_store_that_refuses_ends_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = open_remote(f"file://{tmp_path}/file", "field").child("run")
    with pytest.raises(RemoteStorageError, match=r"file/run/a.json: cannot write it: .*Error"):
        folder.write("a.json", b"")


def test_missing_packages_and_unknown_protocols_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"checkpoint.copy_to: nonsense://a: .*nonsense"):
        open_remote("nonsense://a", "checkpoint.copy_to")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(
        InputError, match=r"s3://a needs a package that is missing .*pip install 'meshwright\[remote\]'"
    ):
        open_remote("s3://a", "checkpoint.copy_to")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(InputError, match=r"needs fsspec: pip install 'meshwright\[remote\]'"):
        open_remote("s3://a", "checkpoint.copy_to")
