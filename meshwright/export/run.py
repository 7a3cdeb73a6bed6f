"""Reads what an export starts from: the job of a run folder, and the job's model with the weights of one checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from meshwright.checkpoint.load import find_newest_valid, load
from meshwright.checkpoint.manifest import Manifest, verify
from meshwright.errors import CheckpointError, InputError
from meshwright.job import Job, load_job
from meshwright.parallel.weights.initialize import initialize_model
from meshwright.train.build import construct_model
from meshwright.train.output.folder import RunFolder


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


def read_run(path: Path, step: str | None = None, settings: Sequence[str] = ()) -> TrainedModel:
    """Returns the trained model of a run folder. `step` selects the checkpoint: a step number, `best` or `last`. None
    selects the best checkpoint, or the last one if there is no best. `settings` override fields of the job."""
    folder = RunFolder(path)
    for part in (folder.job, folder.plan, folder.checkpoints):
        if not part.exists():
            raise InputError(f"{path}: this is no run folder, it has no {part.name}: name one that `train` wrote")
    job = load_job(folder.job, settings)
    checkpoint, manifest, notes = _checkpoint(folder, step)
    model = initialize_model(lambda: construct_model(job), job.train.seed)
    load(checkpoint, model, None)
    return TrainedModel(folder, job, model.eval(), manifest.step, notes)


def _checkpoint(folder: RunFolder, step: str | None) -> tuple[Path, Manifest, tuple[str, ...]]:
    """Returns the path of the checkpoint that `step` selects, its verified manifest, and notes about damaged
    checkpoints."""
    best = folder.checkpoints / "best"
    if step == "best" and not best.exists():
        raise InputError(f"--step best: {folder.path} has no best checkpoint, as its job names no checkpoint.best")
    if step == "last" or (step is None and not best.exists()):
        newest = find_newest_valid(folder.checkpoints)
        damaged = tuple(f"damaged checkpoint left out: {problem}" for problem in newest.problems)
        if newest.path is None or newest.manifest is None:
            raise CheckpointError(f"{folder.path}: {newest.problems[0] if damaged else 'it has no checkpoint yet'}")
        return newest.path, newest.manifest, damaged
    checkpoint = folder.checkpoints / best.readlink() if step in (None, "best") else _checkpoint_at(folder, str(step))
    return checkpoint, verify(checkpoint), ()


def _checkpoint_at(folder: RunFolder, step: str) -> Path:
    """Returns the checkpoint of a step number. If there is none, raises an `InputError` that lists the existing
    ones."""
    checkpoint = folder.checkpoints / f"step-{int(step):08d}" if step.isdecimal() else None
    if checkpoint is None or not checkpoint.is_dir():
        steps = [str(int(path.name.removeprefix("step-"))) for path in sorted(folder.checkpoints.glob("step-*"))]
        raise InputError(f"--step {step}: write best, last or a step that was kept: {', '.join(steps) or 'none was'}")
    return checkpoint
