"""In-batch softmax: each query is to find its own document among all of the global batch, whichever rank has them.

With queries q and documents d of the global batch, τ the temperature:

    loss = - mean over i of log softmax_j(q_i · d_j / τ)[i]
"""

from collections.abc import Callable
from copy import copy
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.errors import InputError

Rows = Callable[[Tensor], tuple[Tensor, int]]  # this rank's rows to those of all ranks, and where its own begin
Vectors = tuple[Tensor, Tensor]  # of queries and of their documents, row by row


class _InBatch:
    def __init__(self) -> None:
        self._across: Rows | None = None

    def joined(self, across: Rows) -> Self:
        """The same over all ranks: called with a rank's own rows, it compares them with everybody's."""
        other = copy(self)
        other._across = across
        return other

    def _scores(self, queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """(own queries, all documents), and which document is each query's own."""
        if queries.dim() != 2 or queries.shape != documents.shape:
            raise InputError(
                f"in-batch softmax takes two vectors a sample, but the model gave {tuple(queries.shape)} and"
                f" {tuple(documents.shape)}: return (queries, documents), (batch, dim) each"
            )
        everybodys, first = self._across(documents) if self._across else (documents, 0)
        return queries @ everybodys.mT, torch.arange(first, first + len(queries), device=queries.device)


class InBatchSoftmax(_InBatch):
    """The sum over this rank's queries. `symmetric`: the mean of that and of documents that find their queries."""

    def __init__(self, temperature: float = 0.05, symmetric: bool = False) -> None:
        super().__init__()
        if not temperature > 0:
            raise InputError(f"the temperature is {temperature}: write a number above 0")
        self.temperature = temperature
        self.symmetric = symmetric

    def __call__(self, output: Vectors, target: object) -> Tensor:
        queries, documents = output
        found = self._one_way(queries, documents)
        return (found + self._one_way(documents, queries)) / 2 if self.symmetric else found

    def _one_way(self, asking: Tensor, asked: Tensor) -> Tensor:
        scores, own = self._scores(asking, asked)
        return F.cross_entropy(scores / self.temperature, own, reduction="sum")


class InBatchAccuracy(_InBatch):
    """The share of queries whose own document has the largest score of the global batch."""

    def __call__(self, output: Vectors, target: object) -> tuple[Tensor, int]:
        scores, own = self._scores(*output)
        return (scores.argmax(dim=1) == own).sum(), len(own)
