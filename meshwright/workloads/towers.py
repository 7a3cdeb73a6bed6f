"""Two towers: queries and documents become vectors of one space, each by a network of its own (Huang et al. 2013)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.workloads.text.json_lines import PADDING


class TwoTowers(nn.Module):
    """Token numbers (batch, length) of queries and documents to the pair of their vectors, (batch, dim) each and of
    length one. The towers share nothing, so they may live on different ranks."""

    def __init__(
        self,
        vocabulary: int,
        width: int = 128,
        layers: Sequence[int] = (512, 256),
        dim: int = 128,
        document_vocabulary: int | None = None,
        document_layers: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.query = Tower(vocabulary, width, layers, dim)
        self.document = Tower(
            document_vocabulary or vocabulary, width, layers if document_layers is None else document_layers, dim
        )

    def forward(self, query: Tensor, document: Tensor) -> tuple[Tensor, Tensor]:
        return self.query(query), self.document(document)


class Tower(nn.Module):
    """The mean of a text's words, and layers on it."""

    def __init__(self, vocabulary: int, width: int, layers: Sequence[int], dim: int) -> None:
        super().__init__()
        for name, count in (
            ("vocabulary", vocabulary),
            ("width", width),
            ("dim", dim),
            *(("layers", n) for n in layers),
        ):
            if not isinstance(count, int) or count < 1:
                raise InputError(f"a tower's {name} is {count!r}: write whole numbers from 1 on")
        self.words = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        sizes = [width, *layers]
        hidden = [m for i, o in pairwise(sizes) for m in (nn.Linear(i, o), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(sizes[-1], dim))

    def forward(self, tokens: Tensor) -> Tensor:
        there = (tokens != PADDING).unsqueeze(-1)
        found = torch.where(there, self.words(tokens), 0.0)
        mean = found.sum(1) / there.sum(1).clamp(min=1)  # a text may be empty
        return F.normalize(self.layers(mean), dim=-1)
