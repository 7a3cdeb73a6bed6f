"""Which weights an export takes: a run folder's job, and its model with those of one checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from meshwright.checkpoint.load import load, newest_good
from meshwright.checkpoint.manifest import Manifest, verify
from meshwright.errors import CheckpointError, InputError
from meshwright.job import Job, load_job
from meshwright.parallel.weights.initialize import initialized
from meshwright.train.build import make_model
from meshwright.train.output.folder import RunFolder


@dataclass(frozen=True)
class Trained:
    """A model as a run left it, in evaluation mode and whole, whatever plan had divided it."""

    folder: RunFolder
    job: Job
    model: nn.Module
    step: int
    notes: tuple[str, ...]

    def fresh(self) -> nn.Module:
        """The job's model without what it has learned: for weights that are read back."""
        return initialized(lambda: make_model(self.job), self.job.train.seed).eval()


def read_run(path: Path, step: str | None = None, settings: Sequence[str] = ()) -> Trained:
    """`step` is a number, `best` or `last`; None: the best one where the job keeps it."""
    folder = RunFolder(path)
    for part in (folder.job, folder.plan, folder.checkpoints):
        if not part.exists():
            raise InputError(f"{path}: this is no run folder, it has no {part.name}: name one that `train` wrote")
    job = load_job(folder.job, settings)
    checkpoint, manifest, notes = _checkpoint(folder, step)
    trained = Trained(folder, job, initialized(lambda: make_model(job), job.train.seed), manifest.step, notes)
    load(checkpoint, trained.model, None)
    trained.model.eval()
    return trained


def _checkpoint(folder: RunFolder, step: str | None) -> tuple[Path, Manifest, tuple[str, ...]]:
    best = folder.checkpoints / "best"
    if step == "best" and not best.exists():
        raise InputError(f"--step best: {folder.path} has no best checkpoint, as its job names no checkpoint.best")
    if step == "last" or (step is None and not best.exists()):
        found = newest_good(folder.checkpoints)
        damaged = tuple(f"damaged checkpoint left out: {problem}" for problem in found.problems)
        if found.path is None or found.manifest is None:
            raise CheckpointError(f"{folder.path}: {found.problems[0] if damaged else 'it has no checkpoint yet'}")
        return found.path, found.manifest, damaged
    chosen = folder.checkpoints / best.readlink() if step in (None, "best") else _numbered(folder, str(step))
    return chosen, verify(chosen), ()


def _numbered(folder: RunFolder, step: str) -> Path:
    chosen = folder.checkpoints / f"step-{int(step):08d}" if step.isdecimal() else None
    if chosen is None or not chosen.is_dir():
        there = [str(int(path.name.removeprefix("step-"))) for path in sorted(folder.checkpoints.glob("step-*"))]
        raise InputError(f"--step {step}: write best, last or a step that was kept: {', '.join(there) or 'none was'}")
    return chosen
