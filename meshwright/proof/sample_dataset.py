"""`SampleDataset`: a data set made from one sample batch, for proofs of a user's model that come without a data set."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.data.order import derive_seed
from meshwright.proof.torch_private import tree_flatten, tree_unflatten
from meshwright.train.step.batch import samples_in


class SampleDataset(Dataset[Any]):
    """A data set of at least `size` samples: first the samples of a batch, then further samples that are made from
    them.

    Plain repetitions would give all ranks equal samples, and hide it if ranks fail to exchange something. Therefore the
    leaves of a further sample (input, target) come from different rows of the batch, and floating-point leaves get some
    noise.
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
        """Returns one sample's row of a leaf of the batch, or the leaf itself if it is the same for all samples.
        `number` is the index of the leaf; `repeat` is 0 for the samples of the batch, and above 0 for further
        samples."""
        if not self._has_row_per_sample(leaf):
            return leaf
        part = leaf[(row + repeat * number) % self.rows]
        if repeat == 0 or not part.is_floating_point():
            return part
        generator = torch.Generator().manual_seed(derive_seed(repeat, "sample", row, number))
        noise = torch.randn(part.shape, dtype=part.dtype, generator=generator)
        return part + 0.1 * part.abs().mean() * noise

    def collate(self, samples: list[Any]) -> Any:
        """Returns the batch of these samples. Leaves with one row per sample are stacked; other leaves are taken
        unchanged from the original batch."""
        columns = list(zip(*(tree_flatten(sample)[0] for sample in samples), strict=True))
        stacked = [
            torch.stack(column) if self._has_row_per_sample(leaf) else leaf
            for leaf, column in zip(self.leaves, columns, strict=True)
        ]
        return tree_unflatten(stacked, self.structure)

    def _has_row_per_sample(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.rows
