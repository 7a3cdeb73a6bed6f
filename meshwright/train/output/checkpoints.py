"""`RunCheckpoints`: the checkpoints of a run, of which the newest ones and the best one are kept."""

import math
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from torch import nn

from meshwright.checkpoint.agreement import from_first_rank, gather_results
from meshwright.checkpoint.background import BackgroundSaver, PublishedSave
from meshwright.checkpoint.frozen import FROZEN, without_frozen
from meshwright.checkpoint.load import difference, find_newest_valid
from meshwright.checkpoint.manifest import Manifest, checkpoint_name
from meshwright.checkpoint.reader import VerifiedCheckpoints
from meshwright.checkpoint.save import check_savable, clear_unfinished, prune
from meshwright.checkpoint.state import GROUPS, ModelDescription, State, describe_model
from meshwright.errors import CheckpointError
from meshwright.files.storage import writing
from meshwright.processes.world import World
from meshwright.train.output.copies import CheckpointCopies
from meshwright.train.output.folder import RunFolder
from meshwright.train.step.nonfinite import infinite_keys, nonfinite_keys
from meshwright.user.job_sections import Checkpoint

LOWER_IS_BETTER = ("loss", "error", "perplexity")
RUNNING_STATISTICS = ("running_mean", "running_var")  # buffers of normalization layers


@dataclass(frozen=True)
class BestCheckpoint:
    """The step at which the metric that `checkpoint.best` names was best so far, and its value there."""

    step: int
    value: float


@dataclass(frozen=True)
class SavedCheckpoint:
    """The path of a valid checkpoint, and its manifest."""

    path: Path
    manifest: Manifest


class NotFiniteError(Exception):
    """A checkpoint was not saved, because the weight, buffer or optimizer entry of this name is NaN or infinite."""


class RunCheckpoints:
    """Saves and finds the checkpoints in a run's folder. All ranks call its methods together."""

    def __init__(
        self, run_folder: RunFolder, world: World, options: Checkpoint, tell: Callable[[str], None] = print
    ) -> None:
        """`tell` shows a line to the user, on rank 0."""
        url = options.copy_to if world.rank == 0 else None
        self._copies = None if url is None else CheckpointCopies(run_folder, url, options.keep)
        self._tell = tell
        self._saver = BackgroundSaver(world.device.type == "cuda", options.on_full, tell, options.asynchronous)
        self._verified = VerifiedCheckpoints()
        self._stalls_s: list[float] = []  # how long training waited for each checkpoint
        self._publish_s: list[float] = []  # how long each checkpoint took until it was published
        self._run_folder = run_folder
        self._folder = run_folder.checkpoints
        self._world = world
        self._options = options
        self._nonfinite_at_start: list[str] = []
        self._model: ModelDescription = {}
        self._module: nn.Module | None = None
        self._frozen_at_start: Any = None

    def note_start(self, state: State, module: nn.Module | None = None) -> None:
        """Notes which tensors are not finite before training, such as a buffer that masks with -inf. They do not keep a
        checkpoint from being good. Raises a `CheckpointError` if the state holds anything that cannot be saved, so that
        a run does not find this out at its first checkpoint. `module` is this rank's model, or None if other processes
        have it."""
        check_savable(state)
        self._model = describe_model(state)
        self._nonfinite_at_start = nonfinite_keys(state)
        self._module = module
        if not self._options.frozen and module is not None:
            self._frozen_at_start = without_frozen(state, module)[FROZEN]

    def _find_nonfinite(self, state: State, keys: Collection[str]) -> str | None:
        """Returns the name of a weight, buffer or optimizer entry of these keys that has become NaN or infinite on this
        rank; None if all are finite. Infinite numbers in buffers are left out, except in running statistics."""
        nonfinite = nonfinite_keys({key: state[key] for key in keys}, self._nonfinite_at_start)
        allowed = _infinite_buffers(state, nonfinite)
        return next((key.removeprefix("model/") for key in nonfinite if key not in allowed), None)

    def save(
        self,
        state: State,
        step: int,
        about: dict[str, Any],
        best: BestCheckpoint | None,
        begin: float | None = None,
        wait: bool = True,
    ) -> Path:
        """Copies the state and starts to save it, and returns the path that the checkpoint will have. Raises a
        `NotFiniteError` on all ranks if a weight, buffer or optimizer entry has become NaN or infinite: such a
        checkpoint would replace one that is good. Old checkpoints are deleted when it is published. `best` is the best
        one so far, or None. `begin` is the time (`time.perf_counter`) at which training stopped for this; None means
        now. With `wait`, or `asynchronous: false` in the job, the checkpoint is published when this returns."""
        begin = time.perf_counter() if begin is None else begin
        self.finish()
        path = self._folder / checkpoint_name(step)
        is_best = best is not None and best.step == step
        nonfinite = self._saver.begin(
            self._without_frozen(state),
            path,
            step,
            about,
            prepare=self._create_folder,
            # Each rank looks at what it writes, so that each number is read once and not on every replica.
            examine=lambda keys: self._find_nonfinite(state, keys),
            published=lambda: self._link_and_prune(path, is_best),
        )
        if nonfinite is not None:
            raise NotFiniteError(nonfinite)
        if wait or not self._options.asynchronous:
            self.finish()
        self._stalls_s.append(time.perf_counter() - begin)
        return path

    def median_times(self) -> dict[str, float | None]:
        """Returns how long training waited for a checkpoint, and how long it took until one was published."""
        times = {"save_stall_s": self._stalls_s, "save_s": self._publish_s}
        return {name: median(values) if values else None for name, values in times.items()}

    def finish(self, limit_s: float | None = None) -> None:
        """Waits until the last checkpoint is published, but not longer than `limit_s`; None means no limit. Raises the
        error if it could not be saved."""
        self._note(self._saver.finish(limit_s))

    def _note(self, published: PublishedSave | None) -> None:
        if published is not None:
            self._publish_s.append(published.seconds)
        self._tell_about_copies()

    def _without_frozen(self, state: State) -> State:
        """Returns the state without frozen parameters if the job leaves them out. If any of them was changed or frozen
        since the start, it returns the whole state, because the model would be built again without that."""
        if self._options.frozen or self._module is None:
            return state
        smaller = without_frozen(state, self._module)
        return smaller if smaller[FROZEN] == self._frozen_at_start else state

    def _create_folder(self) -> None:
        self._run_folder.check_exists()
        with writing(self._folder):
            self._folder.mkdir(exist_ok=True)  # without parents: a run folder that was deleted is an error

    def _link_and_prune(self, newest: Path, is_best: bool) -> None:
        """Points the link `best` to the newest checkpoint if it is the best one, and deletes old checkpoints."""
        with writing(self._folder):
            link = self._folder / "best"
            if is_best:
                _replace_link(link, newest.name)
            best_name = link.readlink().name if link.is_symlink() else None
            with self._copies.lock if self._copies else nullcontext():
                copied_now = self._copies.uploading if self._copies else None
                self._verified.note(newest)
                prune(self._folder, self._options.keep, newest.name, best_name, copied_now, verified=self._verified)
        if self._copies:
            self._copies.begin(newest.name)

    def finish_copies(self, limit_s: float | None) -> None:
        """Waits until the checkpoints are copied to `checkpoint.copy_to`, if the job has this field, but not longer
        than `limit_s`; None means no limit. Other ranks than 0 do not wait."""
        if self._copies:
            self._copies.finish(limit_s)
            self._tell_about_copies()

    def _tell_about_copies(self) -> None:
        for line in self._copies.take_messages() if self._copies else ():
            self._tell(line)

    def find_newest(self) -> tuple[SavedCheckpoint | None, tuple[str, ...]]:
        """Returns the newest valid checkpoint, or None if there is none at all, and one message for each newer one that
        is damaged or not signed. Raises a `CheckpointError` if there are checkpoints but none can be used: a run that
        began again from its first step would delete them.

        A checkpoint that does not fit the model is left out too if an older one fits. If none fits, the user has
        changed the model: the newest one is returned, so that loading it says in what they differ."""
        self.finish()
        problems: list[str] = []
        newest: tuple[SavedCheckpoint, tuple[str, ...]] | None = None
        checkpoint, damaged = self._newest_before(None)
        while checkpoint is not None:
            problems += damaged
            problem = self._difference(checkpoint)
            if problem is None:
                return checkpoint, tuple(problems)
            newest = newest or (checkpoint, tuple(problems))
            problems.append(problem)
            checkpoint, damaged = self._newest_before(checkpoint.manifest.step)
        if newest is None and damaged:
            which = f"none of the {len(damaged)} checkpoints" if len(damaged) > 1 else "not even the only checkpoint"
            raise CheckpointError(
                f"{which} in {self._folder} can be used: {damaged[0]}; mend it, or start a new run with --resume never"
            )
        return newest or (None, ())

    def _newest_before(self, step: int | None) -> tuple[SavedCheckpoint | None, tuple[str, ...]]:
        """Returns the newest valid checkpoint before a step, or of all if `step` is None, and one message for each
        newer one that is damaged. The checkpoint is None if there is no valid one. Rank 0 reads for all ranks."""

        def find() -> tuple[Path | None, dict[str, Any] | None, tuple[str, ...]]:
            newest = find_newest_valid(self._folder, step)
            return newest.path, newest.manifest.model_dump() if newest.manifest else None, newest.problems

        path, manifest, problems = from_first_rank(find)
        checkpoint = None if path is None else SavedCheckpoint(path, Manifest.model_validate(manifest))
        return checkpoint, tuple(problems)

    def _difference(self, checkpoint: SavedCheckpoint) -> str | None:
        """Returns one line about in what a checkpoint differs from the model, the same on all ranks; None if it does
        not."""
        problems = gather_results(lambda: difference(checkpoint.path, checkpoint.manifest, self._model))
        return next((problem for problem in problems if problem), None)

    def clear_unfinished(self) -> None:
        """Removes what a killed run left half written."""
        if self._world.rank == 0:
            clear_unfinished(self._folder)

    def is_better(self, value: float, best: BestCheckpoint | None) -> bool:
        """Whether `value` of the metric that `checkpoint.best` names is better than its value at the best
        checkpoint."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        lower = is_lower_better(self._options.best or "", self._options.better)
        return value < best.value if lower else value > best.value


def is_lower_better(metric: str, better: Literal["lower", "higher"] | None) -> bool:
    """Whether lower values of the metric of this name are better. If `better` is None, the name decides."""
    return better == "lower" if better else any(word in metric.lower() for word in LOWER_IS_BETTER)


def _infinite_buffers(state: State, keys: Collection[str]) -> set[str]:
    """Returns those of the keys that are buffers in which this rank has infinite numbers and no NaN, without running
    statistics. A mask of -inf that the first forward pass fills is such a buffer. Whatever of the model no optimizer
    updates counts as a buffer: a frozen weight that is infinite was so from the start."""
    updated = {f"model/{name}" for group in state.get(GROUPS) or () for name in group["names"]}
    buffers = {key: state[key] for key in keys if key.startswith("model/") and key not in updated}
    return {key for key in infinite_keys(buffers) if not key.endswith(RUNNING_STATISTICS)}


def _replace_link(link: Path, target: str) -> None:
    """Points a symbolic link to another target atomically."""
    temporary = link.with_name(f".{link.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
