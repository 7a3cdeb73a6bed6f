"""Points (t, x) at which a network that solves Burgers' equation is trained and evaluated, in NumPy arrays on disk.

A data set is a folder in the format of `workloads/rows.py`: `train_features.npy` has the rows (t, x), and
`train_targets.npy` the rows (kind of the point, known value); the same for `val`. The kind is 0 where the equation
holds (the value is not used), and 1 where the solution is known: at the initial time, at the boundary, or measured.
"""

from pathlib import Path

import numpy as np

from meshwright.data.order import derive_seed
from meshwright.errors import InputError
from meshwright.files.cache import cache_folder, fill_once
from meshwright.workloads.physics.burgers import EQUATION, VALUE, VISCOSITY, exact_solution, initial_value
from meshwright.workloads.rows import SPLITS, Rows

VERSION = 1  # part of the names of cached folders: raise it when the generated points change
KNOWN_SHARE = 0.1  # of the generated points for training; half of them initial values, half on the boundary


def points(split: str = "train", root: str | None = None, count: int = 11_264, viscosity: float = VISCOSITY) -> Rows:
    """Returns a data set of ((t, x), (kind, value)) from the folder `root`. Without `root`, points are generated:
    `count` of them for training, and a tenth as many for evaluation, where the exact solution is the value of each."""
    if split not in SPLITS:
        raise InputError(f"split is {split!r}: points have {' and '.join(SPLITS)}")
    if count < 20:
        raise InputError(f"count is {count}: write a whole number of at least 20")
    folder = Path(root) if root is not None else _generate(count, viscosity)
    dataset = Rows(folder / f"{split}_features.npy", folder / f"{split}_targets.npy")
    for name, rows in zip(("features", "targets"), dataset[0], strict=True):
        if len(rows) != 2:
            raise InputError(
                f"{folder / f'{split}_{name}.npy'} has {len(rows)} columns: points have 2, (t, x) in the features and"
                " (kind, value) in the targets"
            )
    return dataset


def _generate(count: int, viscosity: float) -> Path:
    def write(folder: Path) -> None:
        for split, (inputs, targets) in (
            ("train", _training_points(count, _random("train"))),
            ("val", _evaluation_points(count // 10, viscosity, _random("val"))),
        ):
            for name, rows in (("features", inputs), ("targets", targets)):
                np.save(folder / f"{split}_{name}.npy", rows.astype(np.float32))

    return fill_once(cache_folder() / "synthetic" / f"burgers-{VERSION}-{count}-{viscosity!r}", write)


def _training_points(count: int, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Draws inputs (t, x) and targets (kind, value): points at the initial time and at the boundary, whose values are
    known, and points where the equation holds."""
    inputs = np.stack([random.uniform(0, 1, count), random.uniform(-1, 1, count)], axis=1)
    targets = np.full((count, 2), [EQUATION, 0.0])
    side = int(count * KNOWN_SHARE / 2)
    initial, boundary = slice(0, side), slice(side, 2 * side)
    inputs[initial, 0] = 0
    inputs[boundary, 1] = random.choice([-1, 1], side)
    targets[: 2 * side, 0] = VALUE
    targets[initial, 1] = initial_value(inputs[initial, 1])
    return inputs, targets


def _evaluation_points(count: int, viscosity: float, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    t, x = random.uniform(0, 1, count), random.uniform(-1, 1, count)
    return np.stack([t, x], axis=1), np.stack([np.full(count, VALUE), exact_solution(t, x, viscosity)], axis=1)


def _random(split: str) -> np.random.RandomState:
    # NumPy promises that RandomState does not change: all versions generate the same files.
    return np.random.RandomState(derive_seed(0, "burgers", split) & 0xFFFFFFFF)
