"""In-batch softmax: a query should have a larger score with its own document than with all other documents of the
global batch, no matter on which rank those are.

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

# Maps this rank's rows to the rows of all ranks, and the index of this rank's first row among them.
GatherRows = Callable[[Tensor], tuple[Tensor, int]]
Vectors = tuple[Tensor, Tensor]  # queries and documents, (batch, dim) each; row i of both is a pair


class _InBatchComparison:
    """Base class that computes the scores of this rank's queries with the documents of all ranks."""

    def __init__(self) -> None:
        self._across: GatherRows | None = None

    def joined(self, across: GatherRows) -> Self:
        """Returns a copy for one rank of many. The copy is called with the rows of this rank, and compares them with
        the rows of all ranks, which `across` gathers."""
        copy_over_ranks = copy(self)
        copy_over_ranks._across = across
        return copy_over_ranks

    def _scores(self, queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the scores (this rank's queries, all documents), and for each query the index of its own document."""
        if queries.dim() != 2 or queries.shape != documents.shape:
            raise InputError(
                f"in-batch softmax takes two vectors per sample, but the model returned {tuple(queries.shape)} and"
                f" {tuple(documents.shape)}: return (queries, documents), (batch, dim) each"
            )
        all_documents, first = self._across(documents) if self._across else (documents, 0)
        return queries @ all_documents.mT, torch.arange(first, first + len(queries), device=queries.device)


class InBatchSoftmax(_InBatchComparison):
    """The loss in the module's docstring, summed over the queries of this rank. With `symmetric`, it is the mean of
    this loss and of the same loss with queries and documents exchanged."""

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
    """A metric: the share of queries whose own document has the largest score of all documents in the global batch. A
    call returns (number of such queries, number of queries) of this rank."""

    def __call__(self, output: Vectors, target: object) -> tuple[Tensor, int]:
        scores, matches = self._scores(*output)
        return (scores.argmax(dim=1) == matches).sum(), len(matches)
