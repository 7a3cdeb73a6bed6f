"""Regression on rows of features: a linear layer, or a small network."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class Regression(nn.Module):
    """Maps rows (batch, features) to (batch, outputs). `hidden` are the widths of hidden layers, each followed by
    ReLU."""

    def __init__(self, features: int = 10, outputs: int = 1, hidden: Sequence[int] = ()) -> None:
        super().__init__()
        sizes = [features, *hidden]
        hidden_layers = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.ReLU())]
        self.layers = nn.Sequential(*hidden_layers, nn.Linear(sizes[-1], outputs))

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.layers(rows)
        return outputs
