"""In-batch softmax: a query should have a larger score with its document than with all other documents of the global
batch, on whichever rank these are.

With queries q and documents d of the global batch and the temperature τ:

    loss = - mean over i of log softmax_j(q_i · d_j / τ)[i]                       `InBatchSoftmax`
"""

from collections.abc import Callable
from copy import copy
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.errors import InputError

# Local rows → the rows of all ranks, and the index of the first local row among them.
GatherRows = Callable[[Tensor], tuple[Tensor, int]]
Vectors = tuple[Tensor, Tensor]  # queries and documents, (batch, dim) each; row i of both is a pair


class _InBatchComparison:
    """Scores of the queries of this rank with the documents of all ranks."""

    def __init__(self) -> None:
        self._across: GatherRows | None = None

    def joined(self, across: GatherRows) -> Self:
        """Returns a copy that is called with the rows of one rank and compares them with the rows of all ranks, which
        `across` gathers."""
        copy_over_ranks = copy(self)
        copy_over_ranks._across = across
        return copy_over_ranks

    def _scores(self, queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the scores (local queries, all documents), and for each query the index of its document."""
        if queries.dim() != 2 or queries.shape != documents.shape:
            raise InputError(
                f"in-batch softmax takes two vectors per sample, but the model returned {tuple(queries.shape)} and"
                f" {tuple(documents.shape)}: return (queries, documents), (batch, dim) each"
            )
        all_documents, first = self._across(documents) if self._across else (documents, 0)
        return queries @ all_documents.mT, torch.arange(first, first + len(queries), device=queries.device)


class InBatchSoftmax(_InBatchComparison):
    """The loss above, summed over the queries of this rank. With `symmetric` it is the mean of this loss and of the
    same loss with queries and documents exchanged."""

    def __init__(self, temperature: float = 0.05, symmetric: bool = False) -> None:
        super().__init__()
        if not temperature > 0:
            raise InputError(f"the temperature is {temperature}: write a number above 0")
        self.temperature = temperature
        self.symmetric = symmetric

    def __call__(self, output: Vectors, target: object) -> Tensor:
        queries, documents = output
        loss = self._one_direction(queries, documents)
        return (loss + self._one_direction(documents, queries)) / 2 if self.symmetric else loss

    def _one_direction(self, queries: Tensor, documents: Tensor) -> Tensor:
        scores, matches = self._scores(queries, documents)
        return F.cross_entropy(scores / self.temperature, matches, reduction="sum")


class InBatchAccuracy(_InBatchComparison):
    """The share of queries whose document has the largest score of all documents in the global batch."""

    def __call__(self, output: Vectors, target: object) -> tuple[Tensor, int]:
        scores, matches = self._scores(*output)
        return (scores.argmax(dim=1) == matches).sum(), len(matches)
