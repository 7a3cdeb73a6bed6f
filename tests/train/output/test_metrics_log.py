"""metrics.jsonl and TensorBoard tell of the run as if nothing had disturbed it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import StorageError
from meshwright.train.output.folder import RunFolder
from meshwright.train.output.metrics_log import MetricsLog


def run_folder(path: Path) -> RunFolder:
    """A folder as a run has it: with its job.yaml."""
    path.mkdir(exist_ok=True)
    RunFolder(path).job.touch()
    return RunFolder(path)


def lines(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


def write(folder: RunFolder, start: int, steps: range, tensorboard: bool = False) -> None:
    logbook = MetricsLog(folder, start, tensorboard)
    for step in steps:
        logbook.write("train", step, 0, {"loss": float(step), "samples_per_s": None})
    logbook.close()


def test_each_line_is_json_with_kind_step_epoch_and_values(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    logbook = MetricsLog(folder, 0, False)
    logbook.write("eval", 7, 2, {"accuracy": 0.5})
    assert {**lines(folder)[0], "time": None} == {
        "kind": "eval",
        "step": 7,
        "epoch": 2,
        "accuracy": 0.5,
        "time": None,
    }, "a line can be read as soon as it is written"
    logbook.close()


def test_a_future_that_did_not_happen_is_taken_out(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    write(folder, 0, range(1, 8))
    write(folder, 4, range(5, 7))
    assert [line["step"] for line in lines(folder)] == [1, 2, 3, 4, 5, 6]


def test_a_line_that_a_kill_cut_short_is_taken_out(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    write(folder, 0, range(1, 4))
    with folder.metrics.open("a") as opened:
        opened.write('{"kind": "train", "st')
    write(folder, 3, range(4, 5))
    assert [line["step"] for line in lines(folder)] == [1, 2, 3, 4]


def test_tensorboard_shows_each_step_once_after_a_restart(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run_folder(tmp_path)
    write(folder, 0, range(1, 8), tensorboard=True)
    write(folder, 4, range(5, 7), tensorboard=True)
    events = EventAccumulator(str(folder.events))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"], "a value that is not known is not shown"
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(s, float(s)) for s in range(1, 7)]


def test_without_tensorboard_no_events_are_written(tmp_path: Path) -> None:
    write(run_folder(tmp_path), 0, range(1, 3))
    assert not run_folder(tmp_path).events.exists()


def test_a_loss_that_is_no_number_is_null_in_json(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    logbook = MetricsLog(folder, 0, False)
    logbook.write("train", 1, 0, {"loss": float("nan"), "lr": float("inf")})
    logbook.close()
    assert "NaN" not in folder.metrics.read_text()
    assert (lines(folder)[0]["loss"], lines(folder)[0]["lr"]) == (None, None)


def test_a_full_disk_is_named_instead_of_dropping_a_line(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    logbook = MetricsLog(folder, 0, False)
    folder.metrics.unlink()
    folder.metrics.symlink_to("/dev/full")  # which cannot take a byte
    with pytest.raises(StorageError, match=r"metrics\.jsonl: the disk mounted at /dev"):
        logbook.write("train", 1, 0, {"loss": 1.0})
    with pytest.raises(StorageError, match=r"metrics\.jsonl: the disk mounted at /dev"):
        logbook.close()  # it tries again


def test_a_log_that_was_deleted_is_created_again_and_a_folder_that_was_is_named(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    logbook = MetricsLog(folder, 0, False)
    logbook.write("train", 1, 0, {"loss": 1.0})
    folder.metrics.unlink()
    logbook.write("train", 2, 0, {"loss": 1.0})
    assert [line["step"] for line in lines(folder)] == [2]
    shutil.rmtree(folder.path)
    with pytest.raises(StorageError, match=f"{folder.path} does not exist"):
        logbook.write("train", 3, 0, {"loss": 1.0})
    assert not folder.path.exists()


@pytest.mark.parametrize("ending", ["write", "close"])
def test_a_folder_that_is_deleted_step_by_step_is_gone_at_the_end(tmp_path: Path, ending: str) -> None:
    folder = run_folder(tmp_path / "run")
    logbook = MetricsLog(folder, 0, False)
    folder.metrics.unlink()  # as `rm -r` begins
    logbook.write("train", 1, 0, {"loss": 1.0})
    folder.job.unlink()
    with pytest.raises(OSError, match="not empty"):
        folder.path.rmdir()  # as `rm -r` ends
    if ending == "write":
        with pytest.raises(StorageError, match="it was deleted, renamed or unmounted"):
            logbook.write("train", 2, 0, {"loss": 1.0})
    logbook.close()
    assert not folder.path.exists()
    with pytest.raises(StorageError, match=f"{folder.path} does not exist"):
        MetricsLog(folder, 0, True)
    assert not folder.path.exists()


def test_a_log_that_lost_only_its_job_is_kept(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    logbook = MetricsLog(folder, 0, False)
    logbook.write("train", 1, 0, {"loss": 1.0})
    folder.job.unlink()
    with pytest.raises(StorageError, match=f"{folder.job} does not exist: .* it was deleted"):
        logbook.write("train", 2, 0, {"loss": 1.0})
    assert [line["step"] for line in lines(folder)] == [1]


@pytest.mark.parametrize(
    "line", [b"\xff\xfe", b'{"step": 1e999999, "kind": 1}', b"[" * 100_000, b"5", b'{"step": [], "kind": 1}']
)
def test_lines_that_no_run_writes_are_taken_out(tmp_path: Path, line: bytes) -> None:
    folder = run_folder(tmp_path)
    write(folder, 0, range(1, 3))
    folder.metrics.write_bytes(line + b"\n" + folder.metrics.read_bytes())
    write(folder, 2, range(3, 4))
    assert [entry["step"] for entry in lines(folder)] == [1, 2, 3]
