"""A manifest covers itself with a checksum, and with a signature if a key is set."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint.manifest import MANIFEST, FileChecksum, Manifest, read_manifest, write_manifest
from meshwright.errors import CheckpointError

FILES = {"rank-00000.bin": FileChecksum(bytes=3, sha256="0" * 64)}
ABOUT: dict[str, Any] = {"step": 4, "position": [0, 4], "seed": 1}


def write(folder: Path, **changes: Any) -> None:
    write_manifest(folder, Manifest(step=4, files=FILES, about={**ABOUT, **changes}))


def edit(folder: Path, **changes: Any) -> None:
    contents = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**contents, **changes}))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write(tmp_path, loss=0.1, evaluated=(4, {"accuracy": float("nan")}), best=(2, 0.5), left_out=[(0, 1)])
    about = read_manifest(tmp_path).about
    assert about["best"] == [2, 0.5]
    assert about["left_out"] == [[0, 1]]


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 10},
        {"files": {}},
        {"about": {**ABOUT, "position": [0, 14]}},
        {"about": {**ABOUT, "seed": 2}},
        {"about": {"step": 4}},
        {"about": None},
        {"format": 1},
        {"checksum": None},
        {"checksum": "0" * 64},
        {"more": 1},
    ],
    ids=str,
)
def test_an_edited_manifest_is_not_believed(tmp_path: Path, changes: dict[str, Any]) -> None:
    write(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=f"{MANIFEST} is damaged"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 5}, "its two step numbers differ"),
        ({"position": [0, -1]}, "greater than or equal to 0"),
        ({"position": [0]}, "Field required"),
        ({"unknown": 1}, "Extra inputs are not permitted"),
    ],
)
def test_an_impossible_manifest_is_not_believed_though_its_checksum_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "model_dump", lambda _: {"step": 4, "files": FILES_RAW, "about": {**ABOUT, **changes}})
        write(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_manifest(tmp_path)


FILES_RAW = {name: checksum.model_dump() for name, checksum in FILES.items()}


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc/passwd", "", ".", "..", "a\0", MANIFEST])
def test_a_file_outside_of_the_folder_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    raw = {"step": 4, "files": {name: FILES_RAW["rank-00000.bin"]}, "about": ABOUT}
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "model_dump", lambda _: raw)
        write(tmp_path)
    with pytest.raises(CheckpointError, match="is not the name of a file"):
        read_manifest(tmp_path)


def test_a_key_signs_and_is_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_KEY", "secret")
    with pytest.raises(CheckpointError, match="is not signed, and MESHWRIGHT_KEY"):
        read_manifest(tmp_path)
    write(tmp_path)
    assert read_manifest(tmp_path).step == 4
    monkeypatch.setenv("MESHWRIGHT_KEY", "other")
    with pytest.raises(CheckpointError, match="is signed with another key or was changed"):
        read_manifest(tmp_path)
    monkeypatch.delenv("MESHWRIGHT_KEY")
    assert read_manifest(tmp_path).step == 4
    assert "secret" not in (tmp_path / MANIFEST).read_text()


def test_a_changed_manifest_with_a_right_checksum_has_no_right_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_KEY", "secret")
    write(tmp_path)
    signature = json.loads((tmp_path / MANIFEST).read_text())["signature"]
    monkeypatch.delenv("MESHWRIGHT_KEY")
    write(tmp_path, seed=2)
    edit(tmp_path, signature=signature)
    monkeypatch.setenv("MESHWRIGHT_KEY", "secret")
    with pytest.raises(CheckpointError, match="is signed with another key or was changed"):
        read_manifest(tmp_path)
