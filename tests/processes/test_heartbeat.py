"""The heartbeat of a rank can be read by other processes at any moment."""

import mmap
import os
from pathlib import Path

import pytest

from meshwright.errors import StorageError
from meshwright.processes.heartbeat import Heartbeat, HeartbeatRecord, describe_progress, heartbeat_file, read_heartbeat


def test_a_heartbeat_reads_back_as_written(tmp_path: Path) -> None:
    heartbeat = Heartbeat.in_folder(tmp_path, 2, attempt=1)
    assert read_heartbeat(heartbeat_file(tmp_path, 2)) == HeartbeatRecord(os.getpid(), 1, -1, "start-up", 0)
    heartbeat.update(57, "backward")
    heartbeat.finish_step()
    assert read_heartbeat(heartbeat_file(tmp_path, 2)) == HeartbeatRecord(os.getpid(), 1, 57, "backward", 1)


def test_a_long_activity_is_cut_between_characters(tmp_path: Path) -> None:
    Heartbeat.in_folder(tmp_path, 0, 0).update(1, "é" * 100)
    record = read_heartbeat(heartbeat_file(tmp_path, 0))
    assert record is not None
    assert set(record.activity) == {"é"}


def test_a_missing_or_empty_file_has_no_heartbeat(tmp_path: Path) -> None:
    assert read_heartbeat(tmp_path / "rank-0.heartbeat") is None
    (tmp_path / "rank-0.heartbeat").write_bytes(b"")
    assert read_heartbeat(tmp_path / "rank-0.heartbeat") is None
    (tmp_path / "rank-0.heartbeat").write_bytes(bytes(200))
    assert read_heartbeat(tmp_path / "rank-0.heartbeat") is None


def test_a_rank_that_starts_again_leaves_the_file_that_others_are_reading(tmp_path: Path) -> None:
    """If it were shortened, a process that reads it through mapped memory would die of SIGBUS."""
    Heartbeat.in_folder(tmp_path, 0, attempt=0).update(57, "backward")
    path = heartbeat_file(tmp_path, 0)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        before = bytes(memory)
        Heartbeat.in_folder(tmp_path, 0, attempt=1).update(58, "forward")
        assert bytes(memory) == before
    record = read_heartbeat(path)
    assert record is not None
    assert (record.attempt, record.step) == (1, 58)
    assert os.listdir(tmp_path) == [path.name]


def test_a_heartbeat_in_memory_is_updated() -> None:
    heartbeat = Heartbeat.in_memory()
    heartbeat.update(4, "evaluate")
    assert (heartbeat.step, heartbeat.activity) == (4, "evaluate")


def test_a_heartbeat_can_move_to_a_folder(tmp_path: Path) -> None:
    heartbeat = Heartbeat.in_memory(attempt=1)
    heartbeat.update(4, "evaluate")
    heartbeat.move_to(tmp_path / "logs", 0)
    assert read_heartbeat(heartbeat_file(tmp_path / "logs", 0)) == HeartbeatRecord(os.getpid(), 1, 4, "evaluate", 0)


def test_progress_is_described_in_words() -> None:
    assert describe_progress(57, "backward") == " at step 57 (backward)"
    assert describe_progress(-1, "start-up") == " in start-up"


def test_a_heartbeat_that_cannot_be_written_does_not_end_the_rank(tmp_path: Path) -> None:
    heartbeat = Heartbeat.in_folder(tmp_path, 0, attempt=0)
    heartbeat.update(4, "forward")
    with Path("/dev/full").open("r+b", buffering=0) as full:
        heartbeat._file = full
        heartbeat.update(5, "backward")
    assert (heartbeat.step, heartbeat.activity) == (5, "backward")
    record = read_heartbeat(heartbeat_file(tmp_path, 0))
    assert record is not None
    assert record.step == 4


def test_a_folder_that_cannot_take_a_heartbeat_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(StorageError, match="is a file, where a folder is needed"):
        Heartbeat.in_memory().move_to(tmp_path / "logs" / "a", 0)


def test_a_run_folder_that_was_deleted_is_not_created_again(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="run does not exist"):
        Heartbeat.in_memory().move_to(tmp_path / "run" / "logs", 0)
    assert list(tmp_path.iterdir()) == []
