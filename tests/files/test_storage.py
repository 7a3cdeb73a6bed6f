"""What cannot be written is explained in one line that names the disk, and files are replaced in one go. For real full
disks see tests/train/runs/test_full_disk.py."""

import errno
import os
import re
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.errors import CheckpointError, InputError, StorageError
from meshwright.files.storage import (
    describe_storage_problem,
    disk_of,
    output_error,
    replacing,
    require_space,
    write_atomically,
    writing,
)

GB = 10**9


def set_disk(monkeypatch: pytest.MonkeyPatch, **values: int) -> None:
    """Lets every disk have 20 GB, of which 0.3 GB are free, or the given values of `os.statvfs`."""
    state: dict[str, Any] = {"f_blocks": 20 * GB, "f_bavail": GB * 3 // 10, "f_files": 100, "f_favail": 5}
    state |= {"f_frsize": 1, "f_flag": 0, **values}
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**state))


def system_error(number: int, path: Path | None = None) -> OSError:
    return OSError(number, os.strerror(number), *([str(path)] if path else []))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, r"the disk mounted at \S+ \(\w+, 18\.6 GiB\) is full: 1\.12 GiB are needed, 286 MiB are free, "
         r"858 MiB are missing; free some space there, or choose an output folder on another disk"),
        (errno.EDQUOT, r"the quota of user \S+ on the disk mounted at \S+ \(.*\) is used up: 1\.12 GiB are needed"),
        (errno.EROFS, r"the disk mounted at \S+ \(.*\) is read-only: mount it writable again"),
        (errno.EACCES, r"user \S+ may not write \S+: change its permissions"),
        (errno.EPERM, r"user \S+ may not write \S+: change its permissions"),
        (errno.ENOTDIR, r"\S+ is a file, where a folder is needed"),
        (errno.EIO, r"the disk mounted at \S+ \(.*\) reports an input/output error: see `dmesg`"),
        (errno.ESTALE, r"the disk mounted at \S+ \(.*\) cannot be reached any more: mount it again"),
        (errno.ENAMETOOLONG, r"'data\.bin' is longer than names can be on the disk"),
        (errno.EFBIG, r"a file of 1\.12 GiB is larger than the disk mounted at .* or `ulimit -f` allows"),
        (errno.EMFILE, r"too many files are open: raise the limit \(`ulimit -n`"),
        (errno.ENFILE, r"too many files are open: raise the limit \(`ulimit -n`"),
    ],
)  # fmt: skip
def test_each_problem_has_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, words: str) -> None:
    set_disk(monkeypatch)
    file = tmp_path / "data.bin"
    problem = describe_storage_problem(system_error(number), file, needed=1_200_000_000)
    assert problem is not None
    assert problem.exit_code == 1
    assert re.match(rf"{file}: {words}", str(problem)), str(problem)
    assert "\n" not in str(problem)


def test_the_disk_is_that_of_the_nearest_folder_that_exists() -> None:
    disk = disk_of(Path("/proc/self/nothing/at/all"))
    assert (disk.mount_point, disk.kind) == ("/proc", "proc")
    assert str(disk) == "the disk mounted at /proc (proc)"  # it has no size


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    file = tmp_path / "runs" / "a" / "metrics.jsonl"
    problem = describe_storage_problem(system_error(errno.ENOENT, file), file)
    assert str(problem).startswith(f"{file}: {tmp_path / 'runs'} does not exist: create it, or choose another output")


def test_other_errors_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert describe_storage_problem(system_error(errno.EINVAL), file) is None
    assert describe_storage_problem(OSError("no number"), file) is None
    for number in (errno.ENOENT, errno.EACCES):  # of a file that is read meanwhile
        assert describe_storage_problem(system_error(number, Path("/data/picture.png")), file) is None
    file.touch()
    assert describe_storage_problem(system_error(errno.ENOENT), file) is None  # nothing is missing


def test_a_disk_without_inodes_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_disk(monkeypatch, f_favail=0)
    words = "can hold no more files: all its inodes are used, although 286 MiB are free"
    assert words in str(describe_storage_problem(system_error(errno.ENOSPC), tmp_path / "a"))
    with pytest.raises(StorageError, match="all its inodes are used"):
        require_space(tmp_path / "a", 10)


def test_space_is_required_before_anything_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require_space(tmp_path, 1)
    with pytest.raises(StorageError, match=r"909,495 TiB are needed, .* are free, .* TiB are missing"):
        require_space(tmp_path / "not" / "there" / "yet", 10**18)
    set_disk(monkeypatch, f_flag=os.ST_RDONLY)
    with pytest.raises(StorageError, match="is read-only"):
        require_space(tmp_path, 1)
    set_disk(monkeypatch, f_blocks=0, f_bavail=0, f_files=0, f_favail=0)  # a disk that does not tell its size
    require_space(tmp_path, 10**18)


def fail_while_writing(path: Path, needed: int | None, last: BaseException, first: OSError | None = None) -> None:
    """Raises `last` while something is written to `path`, while `first` is handled if it is given."""
    with writing(path, needed):
        try:
            if first is not None:
                raise first
        except OSError:
            raise last  # noqa: B904
        raise last


@pytest.mark.parametrize(
    "raised",
    [
        [system_error(errno.ENOSPC)],
        [ValueError("cannot serialize"), system_error(errno.ENOSPC)],
        [ValueError("Error while serializing: I/O error: No space left on device (os error 28)")],
        [RuntimeError("a rank failed: OSError: [Errno 28] No space left on device")],
        [RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")],
    ],
    ids=["plain", "handled", "rust", "message", "torch"],
)
def test_errors_that_hide_a_full_disk_are_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, raised: list[Any]
) -> None:
    set_disk(monkeypatch, f_bavail=1000)
    with pytest.raises(
        StorageError, match=r"is full: 4\.88 KiB are needed, 1,000 bytes are free, 3\.91 KiB are missing"
    ):
        fail_while_writing(tmp_path / "a", 5000, *raised)


def test_the_bytes_that_were_free_before_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write() -> None:
        with writing(tmp_path / "a", needed=5000):
            set_disk(monkeypatch, f_bavail=0)  # what was written so far
            raise system_error(errno.ENOSPC)

    set_disk(monkeypatch, f_bavail=3000)
    with pytest.raises(StorageError, match=r"4\.88 KiB are needed, 2\.93 KiB are free, 1\.95 KiB are missing"):
        write()


@pytest.mark.parametrize(
    "error", [CheckpointError("damaged"), InputError("wrong"), KeyboardInterrupt(), ValueError("odd"), RuntimeError()]
)
def test_errors_that_are_no_problem_of_the_disk_stay_as_they_are(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        fail_while_writing(tmp_path / "a", None, error)
    assert caught.value is error


def test_an_error_that_was_handled_before_is_not_the_cause(tmp_path: Path) -> None:
    def write_after_an_error() -> None:
        try:
            raise system_error(errno.ENOSPC)
        except OSError:
            fail_while_writing(tmp_path / "a", None, ValueError("odd"))

    with pytest.raises(ValueError, match="odd"):
        write_after_an_error()


def test_a_file_is_replaced_in_one_go(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    write_atomically(file, "axes: {}\n")
    file.chmod(0o600)
    write_atomically(file, "größer\n".encode())
    assert file.read_text() == "größer\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    link = tmp_path / "link.yaml"
    link.symlink_to("file.yaml")
    write_atomically(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "file.yaml").read_text() == "text"
    write_atomically(Path("/dev/null"), "text")
    with pytest.raises(StorageError, match="/dev/full: the disk mounted at /dev"):
        write_atomically(Path("/dev/full"), "text")
    assert Path("/dev/full").is_char_device()


@pytest.mark.usefixtures("used_up_quota")
def test_a_failure_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("old")
    with pytest.raises(StorageError, match=r"plan\.yaml: the quota of user \S+ on .* is used up: 3 bytes are needed"):
        write_atomically(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_draft_ends_as_the_file_and_is_removed_if_writing_it_fails(tmp_path: Path) -> None:
    def write(error: Exception) -> None:
        with replacing(tmp_path / "weights.pt2") as draft:
            assert draft.suffix == ".pt2"
            draft.write_text("half")
            raise error

    with pytest.raises(ValueError, match="odd"):
        write(ValueError("odd"))
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is longer than names can be on the disk mounted at"):
        write_atomically(tmp_path / ("a" * 300), "text")
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_folder_is_wrong_input_and_a_full_disk_is_not() -> None:
    wrong = output_error(system_error(errno.EACCES), Path("runs"))
    assert isinstance(wrong, InputError)
    assert str(wrong) == "output: cannot write in 'runs': Permission denied"
    assert isinstance(output_error(system_error(errno.ENOSPC), Path("runs")), StorageError)
