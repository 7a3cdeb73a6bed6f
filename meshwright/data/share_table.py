"""`ShareTable`: the proportions in which ranks divide each batch, by its number, if they change during a run.

Loaders read ahead, and each rank's loader may be at another batch. A change is therefore added to the table before any
loader can be at its first batch, with the same number on every rank. The table lies in shared memory, where worker
processes that were started before see the change.
"""

from collections.abc import Sequence

import torch

ROWS = 64  # more changes than can be between a batch that is trained on and one that is being loaded


class ShareTable:
    """Holds the last changes. Each row is the number of the first batch of a change, and the proportions by rank."""

    def __init__(self, samples: Sequence[int], rows: int = ROWS) -> None:
        """`samples` are the proportions until the first change. `rows` is the number of changes that are kept."""
        table = torch.full((rows, 1 + len(samples)), -1, dtype=torch.int64)
        table[0] = torch.tensor([0, *samples])
        self._rows = table.share_memory_()
        self._count = 1

    def add(self, first: int, samples: Sequence[int]) -> None:
        """Lets batches from number `first` on be divided in these proportions. Changes are added in the order of their
        first batches."""
        self._rows[self._count % len(self._rows)] = torch.tensor([first, *samples])
        self._count += 1

    def at(self, batch: int) -> tuple[int, ...]:
        """The proportions for the batch with this number."""
        rows = self._rows.tolist()
        _, *samples = max(row for row in rows if 0 <= row[0] <= batch)
        return tuple(samples)
