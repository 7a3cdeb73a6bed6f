"""`RunCheckpoints`: the checkpoints of a run, of which the newest ones and the best one are kept."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.load import find_newest_valid
from meshwright.checkpoint.save import clear_unfinished, prune, save
from meshwright.checkpoint.state import State
from meshwright.checkpoint.writer import check_savable
from meshwright.errors import CheckpointError
from meshwright.exchange import broadcast_value
from meshwright.files.storage import writing
from meshwright.job import Checkpoint
from meshwright.launch.world import World
from meshwright.train.step.nonfinite import find_nonfinite_key, nonfinite_keys

LOWER_IS_BETTER = ("loss", "error", "perplexity")


@dataclass(frozen=True)
class BestCheckpoint:
    """The step at which the metric that `checkpoint.best` names was best so far, and its value there."""

    step: int
    value: float


@dataclass(frozen=True)
class SavedCheckpoint:
    """The path of a valid checkpoint, and the field `about` of its manifest."""

    path: Path
    about: Mapping[str, Any]


class RunCheckpoints:
    """Saves and finds the checkpoints in a run's folder. All ranks call its methods together."""

    def __init__(self, folder: Path, world: World, options: Checkpoint) -> None:
        self._folder = folder
        self._world = world
        self._options = options
        self._nonfinite_at_start: list[str] = []

    def note_start(self, state: State) -> None:
        """Notes which tensors are not finite before training, such as a buffer that masks with -inf. They do not keep a
        checkpoint from being good. Raises a `CheckpointError` if the state holds anything that cannot be saved, so that
        a run does not find this out at its first checkpoint."""
        check_savable(state)
        self._nonfinite_at_start = nonfinite_keys(state)

    def find_nonfinite(self, state: State) -> str | None:
        """Returns the name of a weight, buffer or optimizer entry that has become NaN or infinite, the same on all
        ranks; None if all are finite."""
        key = find_nonfinite_key(state, self._nonfinite_at_start, self._world.size)
        return None if key is None else key.removeprefix("model/")

    def save(self, state: State, step: int, about: dict[str, Any], best: BestCheckpoint | None) -> None:
        """Saves a checkpoint, and deletes old ones. `best` is the best one so far, or None."""
        if self._world.rank == 0:
            with writing(self._folder):
                self._folder.mkdir(exist_ok=True)  # without parents: a run folder that was deleted is an error
        path = save(state, self._folder, step, about)
        if self._world.rank == 0:
            with writing(self._folder):
                link = self._folder / "best"
                if best and best.step == step:
                    _replace_link(link, path.name)
                best_name = link.readlink().name if link.is_symlink() else None
                prune(self._folder, self._options.keep, path.name, best_name)

    def find_newest(self) -> tuple[SavedCheckpoint | None, tuple[str, ...]]:
        """Returns the newest valid checkpoint, or None if there is none at all, and one message for each newer one that
        is damaged or not signed. Raises a `CheckpointError` if there are checkpoints but none can be used: a run that
        began again from its first step would delete them."""
        choice: Any = None
        if self._world.rank == 0:
            newest = find_newest_valid(self._folder)
            choice = newest.path, newest.manifest.about if newest.manifest else None, newest.problems
        path, about, problems = broadcast_value(choice) if self._world.size > 1 else choice
        if path is None and problems:
            count = f"none of the {len(problems)} checkpoints" if len(problems) > 1 else "the only checkpoint"
            raise CheckpointError(
                f"{count} in {self._folder} can be used: {problems[0]}; mend it, or start a new run with --resume never"
            )
        return None if path is None else SavedCheckpoint(path, about), tuple(problems)

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
        name, better = self._options.best or "", self._options.better
        lower = better == "lower" if better else any(word in name.lower() for word in LOWER_IS_BETTER)
        return value < best.value if lower else value > best.value


def _replace_link(link: Path, target: str) -> None:
    """Points a symbolic link to another target atomically."""
    temporary = link.with_name(f".{link.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
