"""Rows of numbers for regression, in memory-mapped NumPy arrays on disk: only the rows of a batch are read.

A data set is a folder of `train_features.npy` (rows × features) and `train_targets.npy` (rows × outputs), and the same
for `val`, as `numpy.save` writes them.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.data.order import derive_seed
from meshwright.errors import InputError
from meshwright.files.cache import cache_folder, fill_once

SPLITS = ("train", "val")
CHUNK = 1_000_000  # rows that are generated at a time
NOISE = 0.01  # standard deviation of the noise in generated targets


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """(features, targets) samples, one per row. `columns` is the range of features that are read; None reads all."""

    def __init__(self, features: Path, targets: Path, columns: range | None = None) -> None:
        self._files = features, targets
        self._features, self._targets = _open_mapped(features), _open_mapped(targets)
        self._columns = columns
        if len(self._features) != len(self._targets):
            raise InputError(
                f"{features} has {len(self._features)} rows, but {targets} has {len(self._targets)}: put two files with"
                " the same number of rows there"
            )

    @property
    def width(self) -> int:
        return int(self._features.shape[1])

    def columns(self, begin: int, end: int) -> "Rows":
        """Returns the same rows with the features from `begin` up to `end` only."""
        return Rows(*self._files, range(begin, end))

    def __len__(self) -> int:
        return len(self._features)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features, targets = self.batch_of([index])
        return features[0], targets[0]

    def batch_of(self, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns the features and targets of these rows as one collated batch. Collating them row by row would take
        longer than training on them."""
        features = (
            self._features if self._columns is None else self._features[:, self._columns.start : self._columns.stop]
        )
        selected = (np.take(array, indices, axis=0) for array in (features, self._targets))
        batch_features, batch_targets = (torch.from_numpy(np.ascontiguousarray(rows)) for rows in selected)
        return batch_features, batch_targets

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
    """Returns the rows of a split in the folder `root`. With `synthetic`, rows are generated instead: `count` rows for
    `train`, and a tenth as many for `val`. Their targets are a fixed linear function of the features plus noise."""
    if split not in SPLITS:
        raise InputError(f"split is {split!r}: rows have {' and '.join(SPLITS)}")
    if root is None and not synthetic:
        raise InputError(
            "rows are read from a folder of train_features.npy, train_targets.npy, val_features.npy and"
            " val_targets.npy: --set data.root=FOLDER, or --set data.synthetic=true for generated ones"
        )
    folder = _generate(features, outputs, count) if synthetic else Path(str(root))
    dataset = Rows(folder / f"{split}_features.npy", folder / f"{split}_targets.npy")
    if dataset.width != features:
        raise InputError(f"{folder}: rows have {dataset.width} features, but data.{split}.features is {features}")
    return dataset


def _open_mapped(file: Path) -> np.ndarray:
    if not file.is_file():
        raise InputError(f"there is no file {file}: set data.root to a folder that has {file.name}")
    try:
        array: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"{file} is damaged or no NumPy array: {error}") from None
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.floating):
        raise InputError(f"{file} holds {array.dtype} of shape {array.shape}, not rows of floating-point numbers")
    return array


def _generate(features: int, outputs: int, count: int) -> Path:
    for name, number in (("features", features), ("outputs", outputs), ("count", count)):
        if number < 1:
            raise InputError(f"{name} is {number}: write a whole number of at least 1")

    def write(folder: Path) -> None:
        weights = _random("rule").standard_normal((features, outputs), np.float32) / np.float32(features**0.5)
        for split, number in (("train", count), ("val", max(1, count // 10))):
            inputs = _create_array(folder / f"{split}_features.npy", (number, features))
            targets = _create_array(folder / f"{split}_targets.npy", (number, outputs))
            for begin in range(0, number, CHUNK):
                random, end = _random(split, begin), min(begin + CHUNK, number)
                inputs[begin:end] = random.standard_normal((end - begin, features), np.float32)
                noise = random.standard_normal((end - begin, outputs), np.float32)
                targets[begin:end] = inputs[begin:end] @ weights + np.float32(NOISE) * noise
            inputs.flush()
            targets.flush()

    return fill_once(cache_folder() / "synthetic" / f"rows-{features}-{outputs}-{count}", write)


def _create_array(file: Path, shape: tuple[int, int]) -> np.memmap:
    array = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=shape)
    with file.open("r+b") as opened:
        # Reserves the space: where the disk is full, this raises an error, and writing to mapped memory kills the
        # process.
        if hasattr(os, "posix_fallocate"):  # macOS has no such function
            os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
    return array


def _random(*use: int | str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(derive_seed(0, "rows", *use)))
