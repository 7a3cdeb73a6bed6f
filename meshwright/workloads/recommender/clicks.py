"""Clicks as a data set: the integers and categories of a row, and whether there was a click."""

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
from meshwright.workloads.recommender.click_file import SUFFIXES, ClickArrays, convert_clicks

VERSION = 1  # part of the names of cached folders: raise it when the generated rows change
VALUES = 20  # different values of each generated category
EMPTY = 0.05  # the share of generated fields that are empty

Sample = tuple[Tensor, Tensor, Tensor]


class Clicks(Dataset[Sample]):
    """(integers, categories, label) samples, one per row: logarithms (integers,) in fp32, hashes from 0 to 2^32 - 1
    (categories,) in int64, and 1 or 0 in fp32."""

    def __init__(self, arrays: ClickArrays) -> None:
        self.arrays = arrays
        self._labels, self._integers, self._categories = arrays.open()

    def __len__(self) -> int:
        return self.arrays.rows

    def __getitem__(self, index: int) -> Sample:
        integers, categories, labels = self.batch_of([index])
        return integers[0], categories[0], labels[0]

    def batch_of(self, indices: Sequence[int] | np.ndarray) -> Sample:
        """Returns these rows as one collated batch, which is faster than collating them row by row."""
        integers, categories, labels = (
            np.take(array, indices, axis=0) for array in (self._integers, self._categories, self._labels)
        )
        return torch.from_numpy(integers), torch.from_numpy(categories.astype(np.int64)), torch.from_numpy(labels)

    def __getstate__(self) -> dict[str, Any]:
        return {"arrays": self.arrays}  # workers open the files themselves

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["arrays"])  # type: ignore[misc]


def clicks(
    split: str = "train",
    root: str | None = None,
    synthetic: bool = False,
    integers: int = 13,
    categories: int = 26,
    samples: int = 8000,
) -> Clicks:
    """Returns the rows of a split: of the file in the folder `root` whose name is the split, with one of `SUFFIXES`.
    With `synthetic`, `samples` rows for training, and an eighth as many for evaluation, are generated as such files and
    then read."""
    if integers < 1 or categories < 1:
        raise InputError(f"integers is {integers} and categories is {categories}: a row has at least 1 of each")
    if synthetic:
        root = str(_generate(integers, categories, samples))
    if root is None:
        raise InputError(
            "clicks are read from a folder with train.csv and val.csv (or .tsv, .txt, .parquet):"
            " --set data.root=FOLDER, or --set data.synthetic=true for generated ones"
        )
    files = [file for suffix in SUFFIXES if (file := Path(root) / f"{split}{suffix}").is_file()]
    if len(files) != 1:
        found = f"there are {' and '.join(file.name for file in files)}" if files else "there is none"
        raise InputError(f"{root} should have one file {split}.csv, .tsv, .txt or .parquet, but {found}")
    return Clicks(convert_clicks(files[0], integers, categories))


def _generate(integers: int, categories: int, samples: int) -> Path:
    if samples < 1:
        raise InputError(f"samples is {samples}: generate at least 1")

    def write(folder: Path) -> None:
        for split, count in (("train", samples), ("val", max(1, samples // 8))):
            rows = _generated_rows(split, count, integers, categories)
            (folder / f"{split}.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))

    name = f"clicks-{VERSION}-{integers}-integers-{categories}-categories-{samples}-samples"
    return fill_once(cache_folder() / "synthetic" / name, write)


def _generated_rows(split: str, count: int, integers: int, categories: int) -> list[list[str]]:
    """Draws rows in which the first integer and the first two categories decide about the click."""
    # NumPy promises that RandomState does not change: all versions generate the same files.
    random = np.random.RandomState(derive_seed(0, "clicks", split) & 0xFFFFFFFF)
    numbers = random.geometric(0.1, (count, integers)) - 1
    values = random.randint(0, VALUES, (count, categories))
    likes = 3 * np.cos(np.pi * values[:, 0]) + 2 * np.cos(np.pi * (values[:, 0] + values[:, 1 % categories]))
    labels = random.uniform(size=count) < 1 / (1 + np.exp(-(likes + np.log1p(numbers[:, 0]) - 2)))
    is_empty = random.uniform(size=(count, integers + categories)) < EMPTY
    rows = []
    for label, number, value, empty in zip(labels, numbers, values, is_empty, strict=True):
        texts = [*map(str, number), *(f"{column:04x}{which:04x}" for column, which in enumerate(value))]
        rows.append([str(int(label)), *("" if gone else text for text, gone in zip(texts, empty, strict=True))])
    return rows
