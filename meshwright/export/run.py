"""Reads what an export starts from: the job of a run folder, and the job's model with the weights of one checkpoint."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from meshwright.checkpoint.frozen import FROZEN
from meshwright.checkpoint.load import find_newest_valid, load
from meshwright.checkpoint.manifest import Manifest, checkpoints_in, step_of
from meshwright.checkpoint.reader import open_checkpoint, verify
from meshwright.errors import CheckpointError, InputError
from meshwright.job import Job
from meshwright.parallel.weights.initialize import initialize_model
from meshwright.train.build import build_initialized_model, construct_model
from meshwright.train.output.folder import RunFolder
from meshwright.train.output.origin import open_run


@dataclass(frozen=True)
class TrainedModel:
    """A run's whole model with the weights of a checkpoint, in evaluation mode. It does not depend on the plan of the
    run. `notes` are sentences for the user."""

    folder: RunFolder
    job: Job
    model: nn.Module
    step: int
    notes: tuple[str, ...]

    def initial_model(self) -> nn.Module:
        """Returns the job's model with its initial weights, for loading an exported file into it."""
        return initialize_model(lambda: construct_model(self.job), self.job.train.seed).eval()


def read_run(path: Path, step: str | None = None, settings: Sequence[str] = (), trust: bool = False) -> TrainedModel:
    """Returns the trained model of a run folder. `step` selects the checkpoint: a step number, `best` or `last`. None
    selects the best checkpoint, or the last one if there is no best. `settings` override fields of the job. Raises an
    `InputError` if this user did not write the run and does not `trust` it, as constructing the model executes what
    the job imports."""
    folder = RunFolder(path)
    for part in (folder.job, folder.plan, folder.checkpoints):
        if not os.path.exists(part):
            raise InputError(f"{path}: this is no run folder, it has no {part.name}: name one that `train` wrote")
    job, _ = open_run(path, trust, settings)
    checkpoint, manifest, notes = _checkpoint(folder, step)
    model = _build_model(job, checkpoint, manifest)
    load(checkpoint, manifest, model, None)
    return TrainedModel(folder, job, model.eval(), manifest.step, notes)


def _build_model(job: Job, checkpoint: Path, manifest: Manifest) -> nn.Module:
    """Returns the job's model with its initial weights. `train.weights` is read only if the checkpoint needs the frozen
    weights in it, as the file may not exist any more."""
    with open_checkpoint(checkpoint, manifest) as reader:
        has_all_weights = not reader.objects.get(FROZEN)
    if has_all_weights:
        return initialize_model(lambda: construct_model(job), job.train.seed)
    return build_initialized_model(job)


def _checkpoint(folder: RunFolder, step: str | None) -> tuple[Path, Manifest, tuple[str, ...]]:
    """Returns the path of the checkpoint that `step` selects, its verified manifest, and notes about damaged
    checkpoints."""
    best = folder.checkpoints / "best"
    if step == "best" and not best.exists():
        raise InputError(f"--step best: {folder.path} has no best checkpoint, as its job names no checkpoint.best")
    if step == "last" or (step is None and not best.exists()):
        newest = find_newest_valid(folder.checkpoints)
        damaged = tuple(f"checkpoint left out: {problem}" for problem in newest.problems)
        if newest.path is None or newest.manifest is None:
            raise CheckpointError(f"{folder.path}: {newest.problems[0] if damaged else 'it has no checkpoint yet'}")
        return newest.path, newest.manifest, damaged
    checkpoint = _best_checkpoint(folder) if step in (None, "best") else _checkpoint_at(folder, str(step))
    return checkpoint, verify(checkpoint), ()


def _best_checkpoint(folder: RunFolder) -> Path:
    """Returns the checkpoint that the link `best` names. Raises a `CheckpointError` if it names anything else than a
    checkpoint next to it."""
    best = folder.checkpoints / "best"
    name = os.readlink(best) if best.is_symlink() else ""
    if step_of(name) is None:
        raise CheckpointError(f"{best} is no link to a checkpoint: choose one with --step")
    return folder.checkpoints / name


def _checkpoint_at(folder: RunFolder, step: str) -> Path:
    """Returns the checkpoint of a step number. If there is none, raises an `InputError` that lists the existing
    ones."""
    checkpoints = checkpoints_in(folder.checkpoints)
    number = int(step) if re.fullmatch(r"[0-9]{1,20}", step) else None
    if number not in checkpoints:
        kept = ", ".join(map(str, checkpoints)) or "none was"
        raise InputError(f"--step {step}: write best, last or a step that was kept: {kept}")
    return checkpoints[number]
