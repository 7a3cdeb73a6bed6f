"""Where a run lies, and which run a command goes on with.

runs/mnist-0001/
  job.yaml plan.yaml    what was run, resolved
  metrics.jsonl         one line a logged step or evaluation
  events/               TensorBoard
  checkpoints/          step-…, and `best`
  logs/                 one file a rank
  record/               the first steps, where train was asked to --record them
  result.json           there when the run is finished
"""

import fcntl
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import yaml

from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.plan import Plan

# What may change when a run goes on: how long, how often, how and where, but not what is trained on what.
MAY_CHANGE = {
    "": ("name", "metrics", "checkpoint", "log", "plan", "cluster", "output"),
    "data": ("eval", "workers", "pin_memory"),
    "train": ("epochs", "steps", "timeout_s", "restarts", "grace_s", "deterministic", "weights"),
}


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

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
    def record(self) -> Path:
        return self.path / "record"

    @property
    def result(self) -> Path:
        return self.path / "result.json"


@dataclass(frozen=True)
class Claim:
    """A run folder that this process works in; `lock` keeps others out for as long as it is open. `note` says
    why an unfinished run was left alone."""

    folder: RunFolder
    fresh: bool
    lock: TextIO
    note: str = ""


def claim(job: Job, resume: str) -> Claim:
    """The folder to train in. `auto`: the newest run of this job if it is not finished; `never`: a new one;
    otherwise a run's folder."""
    if resume not in ("auto", "never"):
        return _claim_named(job, Path(resume))
    output = Path(job.output)
    earlier = _runs(output, job.name)
    if resume == "never" or not earlier or earlier[-1].result.exists():
        return _new(output, job.name)
    unfinished = earlier[-1]
    changed = differences(job, unfinished)
    lock = None if changed else _lock(unfinished)
    if lock:
        return Claim(unfinished, False, lock)
    why = changed[0] if changed else "another process is training there"
    return replace(_new(output, job.name), note=f"not going on with {unfinished.path}: {why}")


def record(folder: RunFolder, job: Job, plan: Plan) -> None:
    """Writes down what is about to run."""
    write_text(folder.job, job.to_yaml())
    write_text(folder.plan, plan.to_yaml())
    folder.result.unlink(missing_ok=True)


def differences(job: Job, folder: RunFolder) -> list[str]:
    """The fields that make this another training than the one in the folder."""
    try:
        raw = yaml.safe_load(folder.job.read_text())
        there = _identity(Job.model_validate(raw).model_dump(mode="json"))
    except (OSError, ValueError, yaml.YAMLError):
        return ["job.yaml cannot be read"]
    here = _identity(job.model_dump(mode="json"))
    return [
        f"{key} is {there.get(key)!r} there and {here.get(key)!r} here"
        for key in sorted({*here, *there})
        if here.get(key) != there.get(key)
    ]


def read_result(folder: RunFolder) -> dict[str, Any] | None:
    try:
        return json.loads(folder.result.read_text())
    except FileNotFoundError:
        return None


def write_text(path: Path, text: str) -> None:
    """The old file or the new one, never half of it."""
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text)
    os.replace(aside, path)


def _claim_named(job: Job, path: Path) -> Claim:
    folder = RunFolder(path)
    for part in (folder.job, folder.plan, folder.logs):  # a folder of jobs has a job.yaml, too
        if not part.exists():
            raise InputError(f"--resume {path}: this is no run folder, it has no {part.name}")
    changed = differences(job, folder)
    if changed:
        raise InputError(f"--resume {path}: that run trains something else: {changed[0]}")
    lock = _lock(folder)
    if lock is None:
        raise InputError(f"--resume {path}: another process is training there")
    return Claim(folder, False, lock)


def _new(output: Path, name: str) -> Claim:
    earlier = _runs(output, name)
    number = int(earlier[-1].path.name.rpartition("-")[2]) + 1 if earlier else 1
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
            raise InputError(f"output: cannot write in '{output}': {error.strerror}") from None
        lock = _lock(folder)
        if lock:
            return Claim(folder, True, lock)
        number += 1


def _runs(output: Path, name: str) -> list[RunFolder]:
    found = [p for p in output.glob(f"{name}-*") if p.is_dir() and p.name.removeprefix(f"{name}-").isdigit()]
    return [RunFolder(path) for path in sorted(found, key=lambda p: int(p.name.rpartition("-")[2]))]


def _lock(folder: RunFolder) -> TextIO | None:
    """Held by the operating system, so it is gone with its process, however that ends."""
    try:
        lock = (folder.path / ".lock").open("w")
    except OSError as error:
        raise InputError(f"output: cannot write in '{folder.path}': {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _identity(job: dict[str, Any]) -> dict[str, Any]:
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
