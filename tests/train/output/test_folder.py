"""Which folder a command trains in: a new one, the unfinished one, or the one that the user names."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError, StorageError
from meshwright.files.storage import write_atomically
from meshwright.job import Job, load_job, load_plan
from meshwright.plan import Plan
from meshwright.train.output.folder import (
    LockedRun,
    RunFolder,
    find_run_to_resume,
    job_differences,
    lock_run_folder,
    read_result,
    write_job_and_plan,
)
from tests.train.one_process import EVALUATED, toy_job


def start(job: Job, resume: str = "auto", finish: bool = False) -> LockedRun:
    """Locks a folder as a run does, and releases the lock as a run that ends does."""
    locked_run = lock_run_folder(job, resume)
    write_job_and_plan(locked_run.folder, job, Plan())
    locked_run.folder.logs.mkdir(exist_ok=True)
    if finish:
        write_atomically(locked_run.folder.result, json.dumps({"steps": 1}))
    locked_run.lock.close()
    return locked_run


def test_unfinished_runs_are_resumed_and_finished_ones_are_not(tmp_path: Path) -> None:
    job = toy_job(output=str(tmp_path))
    first = start(job)
    assert (first.folder.path.name, first.is_new) == ("toy-0001", True)
    again = start(job)
    assert (again.folder.path.name, again.is_new) == ("toy-0001", False)
    start(job, finish=True)
    assert start(job).folder.path.name == "toy-0002"


@pytest.mark.parametrize("named", [False, True])
def test_the_run_to_resume_is_the_one_that_is_locked(tmp_path: Path, named: bool) -> None:
    job = toy_job(output=str(tmp_path))
    resume = str(tmp_path / "toy-0001") if named else "auto"
    assert find_run_to_resume(job, resume) is None
    folder = start(job).folder
    assert find_run_to_resume(job, resume) == folder == start(job, resume).folder
    assert find_run_to_resume(job, "never") is None
    other = toy_job(output=str(tmp_path), optimizer={"call": "torch.optim:SGD", "lr": 0.5})
    assert find_run_to_resume(other, resume) is None
    start(job, resume, finish=True)
    assert find_run_to_resume(job, resume) == (folder if named else None)


def test_never_starts_anew(tmp_path: Path) -> None:
    job = toy_job(output=str(tmp_path))
    assert [start(job, "never").folder.path.name for _ in range(3)] == ["toy-0001", "toy-0002", "toy-0003"]


def test_runs_of_other_jobs_and_foreign_folders_do_not_count(tmp_path: Path) -> None:
    for name in ("toy-x", "toy-big-0007", "other-0003"):
        (tmp_path / name).mkdir()
    assert start(toy_job(output=str(tmp_path))).folder.path.name == "toy-0001"
    assert start(toy_job(output=str(tmp_path), name="toy-big")).folder.path.name == "toy-big-0008"


def test_another_training_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    start(toy_job(output=str(tmp_path)))
    other = toy_job(output=str(tmp_path), optimizer={"call": "torch.optim:SGD", "lr": 0.5})
    assert start(other).folder.path.name == "toy-0002"


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"epochs": 9}},
        {"train": {"timeout_s": 5, "restarts": 0, "on_nonfinite": "rewind"}},
        {"checkpoint": {"keep": 9}},
        {"log": {"every_steps": 7}},
        {"plan": {"axes": {"replicate": 2}}},
        {"cluster": "3xcpu"},
        {"data": {"workers": 2}},
        EVALUATED,
    ],
)
def test_how_long_how_often_and_on_what_may_change(tmp_path: Path, change: dict[str, Any]) -> None:
    start(toy_job(output=str(tmp_path)))
    assert start(toy_job(output=str(tmp_path), **change)).is_new is False


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"train": {"global_batch": 5}}, "train.global_batch is 10 there and 5 here"),
        ({"train": {"seed": 4}}, "train.seed is 3 there and 4 here"),
        ({"train": {"freeze": ["layers.0"]}}, "train.freeze"),
        ({"model": {"hidden": 9}}, "model"),
        ({"data": {"drop_last": True}}, "data.drop_last"),
        ({"schedule": {"call": "torch.optim.lr_scheduler:StepLR", "step_size": 1}}, "schedule"),
    ],
)
def test_what_is_trained_on_what_may_not_change(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    folder = start(toy_job(output=str(tmp_path))).folder
    job = toy_job(output=str(tmp_path), **change)
    assert job_differences(job, folder)[0].startswith(field)
    with pytest.raises(InputError, match="that run trains something else: ") as refusal:
        lock_run_folder(job, str(folder.path))
    assert field in str(refusal.value)


def test_a_named_run_is_resumed_even_if_it_is_finished(tmp_path: Path) -> None:
    job = toy_job(output=str(tmp_path))
    folder = start(job, finish=True).folder
    assert start(job, str(folder.path)).folder == folder
    assert read_result(folder) is None, "what is gone on with is not finished"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    job = toy_job(output=str(tmp_path))
    with pytest.raises(InputError, match=r"no run folder, it has no job\.yaml"):
        lock_run_folder(job, str(tmp_path))
    (tmp_path / "job.yaml").write_text(job.to_yaml())
    with pytest.raises(InputError, match=r"no run folder, it has no plan\.yaml"):
        lock_run_folder(job, str(tmp_path))


def test_two_commands_do_not_train_in_one_folder(tmp_path: Path) -> None:
    job = toy_job(output=str(tmp_path))
    first = lock_run_folder(job, "auto")
    write_job_and_plan(first.folder, job, Plan())
    first.folder.logs.mkdir()
    second = lock_run_folder(job, "auto")
    assert second.folder.path.name == "toy-0002"
    with pytest.raises(InputError, match="another process is training there"):
        lock_run_folder(job, str(first.folder.path))
    second.lock.close()
    first.lock.close()
    assert start(job, str(first.folder.path)).folder == first.folder


def test_the_folder_says_what_was_run(tmp_path: Path) -> None:
    job, plan = toy_job(output=str(tmp_path)), Plan.model_validate({"axes": {"replicate": 2}})
    folder = lock_run_folder(job, "auto").folder
    write_job_and_plan(folder, job, plan)
    assert load_job(folder.job) == job
    assert load_plan(folder.plan) == plan


@pytest.mark.parametrize("output", ["file", "file/below"])
def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path, output: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="output: cannot write in "):
        lock_run_folder(toy_job(output=str(tmp_path / output)), "auto")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_text_is_replaced_in_one_go(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_atomically(folder.result, "{}")
    write_atomically(folder.result, '{"steps": 1}')
    assert read_result(folder) == {"steps": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_an_unfinished_run_that_is_left_alone_is_spoken_of(tmp_path: Path) -> None:
    start(toy_job(output=str(tmp_path)))
    other = start(toy_job(output=str(tmp_path), optimizer={"call": "torch.optim:SGD", "lr": 9.0}))
    assert "toy-0001" in other.note
    assert "9.0" in other.note
    locked_run = lock_run_folder(
        toy_job(output=str(tmp_path), optimizer={"call": "torch.optim:SGD", "lr": 9.0}), "auto"
    )
    beside = start(toy_job(output=str(tmp_path), optimizer={"call": "torch.optim:SGD", "lr": 9.0}))
    locked_run.lock.close()
    assert "another process" in beside.note


@pytest.mark.parametrize("name", [".lock", "plan.yaml", "metrics.jsonl", "result.json", "logs/rank-0.log", "events"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_run_that_would_write_elsewhere_or_wait_is_not_resumed(tmp_path: Path, name: str, kind: str) -> None:
    job = toy_job(output=str(tmp_path / "runs"))
    folder = start(job).folder
    entry, victim = folder.path / name, tmp_path / "victim"
    victim.write_text("precious")
    entry.unlink(missing_ok=True)
    if kind == "link":
        entry.symlink_to(victim)
    else:
        os.mkfifo(entry)
    with pytest.raises(InputError, match=f"--resume {folder.path}: {entry} is (a symbolic link|not a regular file)"):
        lock_run_folder(job, str(folder.path))
    new = start(job)
    assert new.folder.path.name == "toy-0002"
    if name != "result.json":  # which says that the run is finished
        assert f"not resuming {folder.path}: {entry} is " in new.note
    assert victim.read_text() == "precious"


def test_a_run_behind_a_link_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    job = toy_job(output=str(tmp_path / "runs"))
    folder = start(job).folder
    assert start(job).folder == folder
    assert start(job, str(folder.path)).folder == folder
    (tmp_path / "run").symlink_to(folder.path)
    assert not start(job, str(tmp_path / "run")).is_new


@pytest.mark.usefixtures("used_up_quota")
def test_a_new_folder_that_cannot_take_the_job_is_deleted_and_an_old_one_stays(tmp_path: Path) -> None:
    job = toy_job(output=str(tmp_path))
    locked_run = lock_run_folder(job, "auto")
    with pytest.raises(StorageError, match=r"job\.yaml: the quota of user"):
        write_job_and_plan(locked_run.folder, job, Plan())
    assert list(tmp_path.iterdir()) == []
    old = RunFolder(tmp_path / "toy-0007")
    old.path.mkdir()
    old.job.write_text("name: old")
    with pytest.raises(StorageError, match=r"job\.yaml: the quota of user"):
        write_job_and_plan(old, job, Plan())
    assert old.job.read_text() == "name: old"
