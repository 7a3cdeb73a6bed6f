"""A data set made of a sample batch, for a user's model that comes without one."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import Dataset

from meshwright.data.order import derive
from meshwright.train.step.batch import samples_in


class Samples(Dataset[Any]):
    """The batch's samples, and as many more as are wanted: samples that are equal on all ranks would hide that ranks
    do not exchange what they should. Beyond the batch, the parts of a sample (input, target) come from different
    rows of it, and floating-point ones are disturbed a little."""

    def __init__(self, batch: Any, size: int) -> None:
        self.rows = samples_in(batch)
        self.size = max(size, self.rows)
        self.leaves, self.form = tree_flatten(batch)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        again, row = divmod(index, self.rows)
        return tree_unflatten([self._part(leaf, n, row, again) for n, leaf in enumerate(self.leaves)], self.form)

    def _part(self, leaf: Any, number: int, row: int, again: int) -> Any:
        if not self._per_sample(leaf):
            return leaf
        part = leaf[(row + again * number) % self.rows]
        if again == 0 or not part.is_floating_point():
            return part
        generator = torch.Generator().manual_seed(derive(again, "sample", row, number))
        noise = torch.randn(part.shape, dtype=part.dtype, generator=generator)
        return part + 0.1 * part.abs().mean() * noise

    def collate(self, samples: list[Any]) -> Any:
        """Stacks what differs from sample to sample; what the batch has once, it has once again."""
        columns = list(zip(*(tree_flatten(sample)[0] for sample in samples), strict=True))
        stacked = [
            torch.stack(column) if self._per_sample(leaf) else leaf
            for leaf, column in zip(self.leaves, columns, strict=True)
        ]
        return tree_unflatten(stacked, self.form)

    def _per_sample(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.rows
