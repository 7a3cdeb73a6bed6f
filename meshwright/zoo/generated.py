"""`GeneratedSamples`: a data set whose sample number i is computed from (seed, split, i) when it is read."""

from typing import Any

import torch
from torch import Generator
from torch.utils.data import Dataset

from meshwright.data.order import derive_seed
from meshwright.errors import InputError


class GeneratedSamples(Dataset[Any]):
    """Generated samples. A subclass returns sample number `index` in `make`, from a generator that is seeded for it."""

    def __init__(self, split: str, samples: int, seed: int) -> None:
        if samples < 1:
            raise InputError(f"samples is {samples}: write a whole number of at least 1")
        self.split, self.samples, self.seed = split, samples, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        seed = derive_seed(self.seed, type(self).__name__, self.split, index)
        return self.make(index, torch.Generator().manual_seed(seed))

    def make(self, index: int, generator: Generator) -> Any:
        raise NotImplementedError


def refuse_without_synthetic(name: str, synthetic: bool) -> None:
    """Raises an `InputError` if a data set of which there are only generated samples is to be read."""
    if not synthetic:
        raise InputError(
            f"{name} has generated samples only: set data.synthetic to true, or name your own data set in data.train,"
            " whose samples have the same keys"
        )
