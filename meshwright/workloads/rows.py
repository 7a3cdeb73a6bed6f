"""Rows of numbers for regression, far more than a batch: NumPy arrays on disk, of which only a batch's rows are read.

A data set is a folder of `train_features.npy` (rows × features) and `train_targets.npy` (rows × outputs), and the same
for `val`, as `numpy.save` writes them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.cache import cache_folder, made_once
from meshwright.data.order import derive
from meshwright.errors import InputError

SPLITS = ("train", "val")
CHUNK = 1_000_000  # rows that are generated at a time
NOISE = 0.01


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """(features, targets) of a row. `columns` are those of the features that this rank reads."""

    def __init__(self, features: Path, targets: Path, columns: range | None = None) -> None:
        self._files = features, targets
        self._features, self._targets = _mapped(features), _mapped(targets)
        self._columns = columns
        if len(self._features) != len(self._targets):
            raise InputError(
                f"{features} has {len(self._features)} rows, but {targets} has {len(self._targets)}: they are not"
                " of one data set"
            )

    @property
    def width(self) -> int:
        return int(self._features.shape[1])

    def columns(self, begin: int, end: int) -> "Rows":
        return Rows(*self._files, range(begin, end))

    def __len__(self) -> int:
        return len(self._features)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features, targets = self.batch_of([index])
        return features[0], targets[0]

    def batch_of(self, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """A whole batch at once: rows handed over one by one would take longer than training on them."""
        features = (
            self._features if self._columns is None else self._features[:, self._columns.start : self._columns.stop]
        )
        chosen = (np.take(array, indices, axis=0) for array in (features, self._targets))
        first, second = (torch.from_numpy(np.ascontiguousarray(rows)) for rows in chosen)
        return first, second

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self._files, "columns": self._columns}  # workers open the files themselves

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["files"], state["columns"])  # type: ignore[misc]


def rows(
    split: str = "train",
    root: str | None = None,
    synthetic: bool = False,
    features: int = 10,
    outputs: int = 1,
    count: int = 10_000_000,
    seed: int = 0,
) -> Rows:
    """The rows in the folder `root`; with `synthetic`, `count` generated ones (of `val` a tenth), whose targets are a
    fixed linear function of their features."""
    if split not in SPLITS:
        raise InputError(f"split is {split!r}: rows have {' and '.join(SPLITS)}")
    if root is None and not synthetic:
        raise InputError(
            "rows are read from a folder of train_features.npy, train_targets.npy, val_features.npy and"
            " val_targets.npy: --set data.root=FOLDER, or --set data.synthetic=true for generated ones"
        )
    folder = _generated(features, outputs, count) if synthetic else Path(str(root))
    found = Rows(folder / f"{split}_features.npy", folder / f"{split}_targets.npy")
    if found.width != features:
        raise InputError(f"{folder}: rows have {found.width} features, but data.{split}.features is {features}")
    return found


def _mapped(file: Path) -> np.ndarray:
    if not file.is_file():
        raise InputError(f"there is no file {file}: data.root is a folder of {file.name} and its like")
    try:
        found: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"{file} is damaged or no NumPy array: {error}") from None
    if found.ndim != 2 or not np.issubdtype(found.dtype, np.floating):
        raise InputError(f"{file} holds {found.dtype} of shape {found.shape}, not rows of floating-point numbers")
    return found


def _generated(features: int, outputs: int, count: int) -> Path:
    for name, number in (("features", features), ("outputs", outputs), ("count", count)):
        if number < 1:
            raise InputError(f"{name} is {number}: write a whole number from 1 on")

    def make(folder: Path) -> None:
        rule = _random("rule").standard_normal((features, outputs), np.float32) / np.float32(features**0.5)
        for split, number in (("train", count), ("val", max(1, count // 10))):
            inputs = _new(folder / f"{split}_features.npy", (number, features))
            targets = _new(folder / f"{split}_targets.npy", (number, outputs))
            for begin in range(0, number, CHUNK):
                random, end = _random(split, begin), min(begin + CHUNK, number)
                inputs[begin:end] = random.standard_normal((end - begin, features), np.float32)
                noise = random.standard_normal((end - begin, outputs), np.float32)
                targets[begin:end] = inputs[begin:end] @ rule + np.float32(NOISE) * noise
            inputs.flush()
            targets.flush()

    return made_once(cache_folder() / "synthetic" / f"rows-{features}-{outputs}-{count}", make)


def _new(file: Path, shape: tuple[int, int]) -> np.memmap:
    return np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=shape)


def _random(*use: int | str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(derive(0, "rows", *use)))
