"""A two-tower model: one network maps queries and another maps documents to vectors of the same space (Huang et al.
2013)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.workloads.text.json_lines import PADDING


class TwoTowers(nn.Module):
    """Maps token numbers (batch, length) of queries and documents to a pair of vectors (batch, dim) with norm one. The
    towers share no parameters, so they can be placed on different ranks."""

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
    """The mean of the embeddings of a text's words, followed by linear layers with ReLU between them."""

    def __init__(self, vocabulary: int, width: int, layers: Sequence[int], dim: int) -> None:
        super().__init__()
        for name, count in (
            ("vocabulary", vocabulary),
            ("width", width),
            ("dim", dim),
            *(("layers", n) for n in layers),
        ):
            if not isinstance(count, int) or count < 1:
                raise InputError(f"a tower's {name} is {count!r}: write whole numbers of at least 1")
        self.words = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        sizes = [width, *layers]
        hidden = [m for i, o in pairwise(sizes) for m in (nn.Linear(i, o), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(sizes[-1], dim))

    def forward(self, tokens: Tensor) -> Tensor:
        is_token = (tokens != PADDING).unsqueeze(-1)
        embeddings = torch.where(is_token, self.words(tokens), 0.0)
        mean = embeddings.sum(1) / is_token.sum(1).clamp(min=1)  # a text may be empty
        return F.normalize(self.layers(mean), dim=-1)
