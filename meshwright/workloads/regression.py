"""Regression: a linear map of a row's features, or a small network on them."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class Regression(nn.Module):
    """Rows (batch, features) to (batch, outputs); `hidden` are the widths of layers between, with ReLU behind each."""

    def __init__(self, features: int = 10, outputs: int = 1, hidden: Sequence[int] = ()) -> None:
        super().__init__()
        sizes = [features, *hidden]
        between = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.ReLU())]
        self.layers = nn.Sequential(*between, nn.Linear(sizes[-1], outputs))

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.layers(rows)
        return found
