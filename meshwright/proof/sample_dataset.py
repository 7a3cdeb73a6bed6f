"""A data set made of a sample batch, for a user's model without a data set."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.data.order import derive_seed
from meshwright.proof.torch_private import tree_flatten, tree_unflatten
from meshwright.train.step.batch import samples_in


class SampleDataset(Dataset[Any]):
    """The samples of a batch, followed by further ones up to `size`.

    Repeated samples would be equal on all ranks, and hide that ranks do not exchange what they should. So the parts of
    a further sample (input, target) come from different rows of the batch, and floating-point ones get some noise.
    """

    def __init__(self, batch: Any, size: int) -> None:
        self.rows = samples_in(batch)
        self.size = max(size, self.rows)
        self.leaves, self.structure = tree_flatten(batch)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        repeat, row = divmod(index, self.rows)
        parts = [self._part(leaf, number, row, repeat) for number, leaf in enumerate(self.leaves)]
        return tree_unflatten(parts, self.structure)

    def _part(self, leaf: Any, number: int, row: int, repeat: int) -> Any:
        """One sample's part of a leaf; the whole leaf if it is the same for all samples."""
        if not self._has_row_per_sample(leaf):
            return leaf
        part = leaf[(row + repeat * number) % self.rows]
        if repeat == 0 or not part.is_floating_point():
            return part
        generator = torch.Generator().manual_seed(derive_seed(repeat, "sample", row, number))
        noise = torch.randn(part.shape, dtype=part.dtype, generator=generator)
        return part + 0.1 * part.abs().mean() * noise

    def collate(self, samples: list[Any]) -> Any:
        """Stacks the leaves that have a row per sample, and takes the others as they are in the batch."""
        columns = list(zip(*(tree_flatten(sample)[0] for sample in samples), strict=True))
        stacked = [
            torch.stack(column) if self._has_row_per_sample(leaf) else leaf
            for leaf, column in zip(self.leaves, columns, strict=True)
        ]
        return tree_unflatten(stacked, self.structure)

    def _has_row_per_sample(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.rows
