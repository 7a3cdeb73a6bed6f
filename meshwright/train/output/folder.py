"""The folder of a run, and which run a command resumes.

runs/mnist-0001/
  job.yaml plan.yaml    what is run, with absolute paths
  reasons.yaml          why each field of the plan has its value (auto/decision.py)
  device.txt            the device that the plan was made for, such as `cuda NVIDIA H200`
  origin.json           the signature of both by the user who trained
  metrics.jsonl         one line per logged step or evaluation
  events/               TensorBoard
  checkpoints/          step-…, and the link `best`
  logs/                 one file per rank, and reports of ranks that were stuck (stall-1.txt)
  times/                one file per rank: what its time was spent on; recoveries.jsonl: how long recoveries took
  record/               the first steps, with `train --record`
  shares.jsonl          how ranks divide batches, if that changes during the run (`shares.adaptive`)
  copies.json           the name and the number that its copies have, with `checkpoint.copy_to`
  page.json             what its page shows besides measurements: prediction, cluster, plan on the model
  profile/              one trace per rank, of the steps of `log.profile_steps`
  result.json           exists when the run is finished
"""

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import yaml

from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError, MeshwrightError, StorageError
from meshwright.files.foreign import read_json
from meshwright.files.regular_file import find_unsafe_entry
from meshwright.files.storage import output_error, write_atomically, writing
from meshwright.files.user_path import user_path
from meshwright.files.yaml_file import parse_mapping
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.train.output.origin import ORIGIN_FILE, origin_text, read_run_file
from meshwright.user.code import printable

# The fields that may change when a run is resumed: all that do not decide which model is trained on which data.
MAY_CHANGE = {
    "": ("name", "metrics", "callbacks", "checkpoint", "log", "plan", "allow", "tune", "cluster", "output"),
    "data": ("eval", "workers", "timeout_s", "pin_memory"),
    "train": (
        *("epochs", "steps", "timeout_s", "restarts", "grace_s", "spare", "deterministic", "weights"),
        *("on_nonfinite", "on_spike", "spike"),
    ),
}


@dataclass(frozen=True)
class RunFolder:
    """The paths of the files in a run folder."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def times(self) -> Path:
        return self.path / "times"

    @property
    def recoveries(self) -> Path:
        return self.times / "recoveries.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events"

    @property
    def job(self) -> Path:
        return self.path / "job.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.yaml"

    @property
    def reasons(self) -> Path:
        """Why each field of the plan has its value."""
        return self.path / "reasons.yaml"

    @property
    def device(self) -> Path:
        return self.path / "device.txt"

    @property
    def origin(self) -> Path:
        return self.path / ORIGIN_FILE

    @property
    def record(self) -> Path:
        return self.path / "record"

    @property
    def shares(self) -> Path:
        return self.path / "shares.jsonl"

    @property
    def copies(self) -> Path:
        return self.path / "copies.json"

    @property
    def page(self) -> Path:
        return self.path / "page.json"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    def check_exists(self) -> None:
        """Raises a `StorageError` if the folder was deleted, or if that has begun: then its job.yaml is missing. Who
        writes in a running run's folder calls this first, because a new file would keep the folder from being
        deleted."""
        with writing(self.job):
            self.job.stat()


@dataclass(frozen=True)
class LockedRun:
    """A run folder that this process trains in. `lock` keeps other processes out as long as it is open. `is_new`: the
    folder was created for this run. `note` says why an unfinished run was not resumed, and is empty otherwise."""

    folder: RunFolder
    is_new: bool
    lock: TextIO
    note: str = ""


def lock_run_folder(job: Job, resume: str) -> LockedRun:
    """Chooses the folder to train in, and locks it. `resume` is `auto` for the newest run of this job, or a new folder
    if that run is finished or cannot be resumed; `never` for a new folder; or the path of a run folder."""
    if resume not in ("auto", "never"):
        return _lock_named_folder(job, user_path(resume, "--resume"))
    output = Path(job.output)
    runs = runs_of(output, job.name)
    if resume == "never" or not runs or runs[-1].result.exists():
        return create_folder(output, job.name)
    unfinished = runs[-1]
    reason = why_not_resumed(job, unfinished)
    lock = None if reason else _lock(unfinished)
    if lock:
        return LockedRun(unfinished, False, lock)
    reason = reason or "another process is training there"
    return replace(create_folder(output, job.name), note=f"not resuming {unfinished.path}: {reason}")


def find_run_to_resume(job: Job, resume: str) -> RunFolder | None:
    """Returns the run that `lock_run_folder` continues, unless another process is training there; None if it creates a
    new folder or raises an error."""
    if resume == "never":
        return None
    if resume == "auto":
        unfinished = [run for run in runs_of(Path(job.output), job.name)[-1:] if not run.result.exists()]
        runs = [run for run in unfinished if not why_not_resumed(job, run)]
        return runs[0] if runs else None
    folder = RunFolder(user_path(resume, "--resume"))
    return folder if os.path.exists(folder.job) and not why_not_resumed(job, folder) else None


def device_text(cluster: Cluster) -> str:
    """The content of device.txt for runs on this cluster."""
    return f"{cluster.kind} {cluster.nodes[0].device.name}\n"


def write_job_and_plan(
    folder: RunFolder, job: Job, plan: Plan, cluster: Cluster | None = None, reasons: Mapping[str, str] | None = None
) -> None:
    """Writes the job and the plan that are about to run, on which device of the cluster, and the reasons for the plan's
    fields, which stay if a run goes on with its plan; signs job and plan if the user has a key, and removes the result
    of an earlier run. If a new folder cannot take them, it is deleted."""
    job_text, plan_text = job.to_yaml(), plan.to_yaml()
    origin = origin_text(job_text, plan_text)
    is_new = not folder.job.exists()
    try:
        if is_new or not folder.plan.exists() or read_run_file(folder.plan) != plan_text:
            with writing(folder.path):
                folder.reasons.unlink(missing_ok=True)
        if reasons and not folder.reasons.exists():
            write_reasons(folder, reasons)
        write_atomically(folder.job, job_text)
        write_atomically(folder.plan, plan_text)
        if cluster is not None:
            write_atomically(folder.device, device_text(cluster))
        with writing(folder.path):
            folder.origin.unlink(missing_ok=True)
            folder.result.unlink(missing_ok=True)
        if origin is not None:
            write_atomically(folder.origin, origin)
    except StorageError:
        if is_new:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def write_reasons(folder: RunFolder, reasons: Mapping[str, str]) -> None:
    write_atomically(folder.reasons, yaml.safe_dump(dict(reasons), sort_keys=False, width=1000))


def read_reasons(folder: RunFolder) -> dict[str, str]:
    """Why each field of the run's plan has its value, by name; empty if that is not known."""
    try:
        read = parse_mapping(read_run_file(folder.reasons), folder.reasons, "reasons")
    except MeshwrightError:  # of a plan that was given to the run, or damaged
        return {}
    return {printable(str(name)): printable(str(reason)) for name, reason in read.items()}


def write_page_values(folder: RunFolder, values: Mapping[str, Any]) -> None:
    """Writes page.json, of `meshwright/report/run/page_values.py`."""
    write_atomically(folder.page, json.dumps(values))


def job_differences(job: Job, folder: RunFolder) -> list[str]:
    """Returns why the job cannot resume the run in the folder, one sentence per field that differs; empty if it can."""
    try:
        raw = parse_mapping(read_run_file(folder.job), folder.job, "job")
        in_folder = _fixed_fields(Job.model_validate(raw).model_dump(mode="json"))
    except (InputError, ValueError):
        return ["job.yaml cannot be read"]
    in_job = _fixed_fields(job.model_dump(mode="json"))
    return [
        f"{key} is {in_folder.get(key)!r} there and {in_job.get(key)!r} here"
        for key in sorted({*in_job, *in_folder})
        if in_job.get(key) != in_folder.get(key)
    ]


_AGAIN = "delete it, and `train` with --resume makes it again"


def read_result(folder: RunFolder) -> dict[str, Any] | None:
    """The contents of result.json; None if the run is not finished."""
    try:
        result = read_json(folder.result)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{folder.result} cannot be read ({error}): {_AGAIN}") from None
    if not isinstance(result, dict):
        raise InputError(f"{folder.result} is no JSON object: {_AGAIN}")
    return result


def _lock_named_folder(job: Job, path: Path) -> LockedRun:
    """Locks the run folder that the user names. Raises an `InputError` if the job cannot be resumed there."""
    folder = RunFolder(path)
    for part in (folder.job, folder.plan, folder.logs):  # job.yaml alone would also be in a folder of jobs
        if not os.path.exists(part):
            raise InputError(f"--resume {path}: this is no run folder, it has no {part.name}")
    reason = why_not_resumed(job, folder)
    if reason:
        raise InputError(f"--resume {path}: {reason}")
    lock = _lock(folder)
    if lock is None:
        raise InputError(f"--resume {path}: another process is training there")
    return LockedRun(folder, False, lock)


def why_not_resumed(job: Job, folder: RunFolder) -> str | None:
    """Returns why the job cannot train in an existing run folder; None if it can."""
    differences = job_differences(job, folder)
    if differences:
        return f"that run trains something else: {differences[0]}"
    return find_unsafe_entry(folder.path)


def create_folder(output: Path, name: str) -> LockedRun:
    """Creates and locks a folder with the next free number."""
    runs = runs_of(output, name)
    number = int(runs[-1].path.name.rpartition("-")[2]) + 1 if runs else 1
    while True:
        folder = RunFolder(output / f"{name}-{number:04d}")
        try:
            folder.path.mkdir(parents=True)
        except FileExistsError:
            if not folder.path.is_dir() or not output.is_dir():
                raise InputError(f"output: {folder.path} is in the way: it is not a folder") from None
            number += 1
            continue
        except OSError as error:
            raise output_error(error, output) from None
        lock = _lock(folder)
        if lock:
            return LockedRun(folder, True, lock)
        number += 1


def runs_of(output: Path, name: str) -> list[RunFolder]:
    """The run folders of a job, from the oldest to the newest."""
    paths = [p for p in output.glob(f"{name}-*") if p.is_dir() and p.name.removeprefix(f"{name}-").isdigit()]
    return [RunFolder(path) for path in sorted(paths, key=lambda p: int(p.name.rpartition("-")[2]))]


def _lock(folder: RunFolder) -> TextIO | None:
    """Locks a run folder and returns the open lock file; None if another process has locked the folder. The operating
    system releases the lock when the process ends, however it ends."""
    try:
        lock = (folder.path / ".lock").open("a")  # not "w": in a folder of others it could be a link to any file
    except OSError as error:
        raise output_error(error, folder.path) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _fixed_fields(job: dict[str, Any]) -> dict[str, Any]:
    """The fields that may not change when a run is resumed, by their dotted names."""
    flat: dict[str, Any] = {}
    for section, value in job.items():
        if section in MAY_CHANGE[""]:
            continue
        if section in MAY_CHANGE:
            fields = {k: v for k, v in value.items() if k not in MAY_CHANGE[section]}
            flat.update({f"{section}.{key}": item for key, item in fields.items()})
        else:
            flat[section] = value
    return flat
