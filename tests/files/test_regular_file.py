"""Folders of somebody else are not written in where that would write elsewhere or wait for ever."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.files.regular_file import find_unsafe_entry, open_regular_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files, and with links to places inside of it."""
    made = tmp_path / "run"
    (made / "checkpoints" / "step-1").mkdir(parents=True)
    (made / "plan.yaml").touch()
    (made / "checkpoints" / "best").symlink_to("step-1")
    (made / "logs").symlink_to(made / "checkpoints")
    return made


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


SPECIAL_FILES: list[Callable[[Path], None]] = [os.mkfifo, bind]
OUTSIDE = ["/etc/passwd", "../../other", "../..", "not/../../../there", "/dev/null", "loop"]


def test_links_inside_of_the_folder_are_safe(folder: Path) -> None:
    assert find_unsafe_entry(folder) is None


def test_the_folder_itself_may_be_behind_a_link(folder: Path) -> None:
    link = folder.with_name("link")
    link.symlink_to(folder.parent)
    assert find_unsafe_entry(link / "run") is None
    (folder / "metrics.jsonl").symlink_to("/etc/passwd")
    shown = f"{link}/run/metrics.jsonl is a symbolic link to /etc/passwd, outside of {link}/run: remove the link"
    assert find_unsafe_entry(link / "run") == shown


@pytest.mark.parametrize("target", OUTSIDE)
@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/.writing-step-2"])
def test_links_that_lead_outside_are_unsafe_whether_or_not_their_target_exists(
    folder: Path, name: str, target: str
) -> None:
    target = Path(name).name if target == "loop" else target
    (folder / name).symlink_to(target)
    assert f"{folder / name} is a symbolic link to {target}, outside" in str(find_unsafe_entry(folder))
    assert find_unsafe_entry(folder, "plan.yaml", "missing") is None
    assert find_unsafe_entry(folder, name.partition("/")[0]) is not None


@pytest.mark.parametrize("make", SPECIAL_FILES)
def test_special_files_are_unsafe_and_not_opened(
    folder: Path, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / "checkpoints")  # the path of a socket is short
    make(Path("step-1/x"))
    assert f"{folder}/checkpoints/step-1/x is not a regular file" in str(find_unsafe_entry(folder))
    with pytest.raises(OSError, match=r"not a regular file|No such device"):
        open_regular_file(folder / "checkpoints" / "step-1" / "x")
