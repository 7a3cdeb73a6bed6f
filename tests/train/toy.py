"""A small model with dropout and a small data set, for jobs that tests train and break."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset


class Net(nn.Module):
    """Wide enough that gradients fill several buckets, so that their layout matters."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, hidden),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(hidden, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def points(size: int = 510) -> Dataset[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    rule = torch.randn(20, 5, generator=generator)
    x = torch.randn(size, 20, generator=generator)
    return TensorDataset(x, (x @ rule).argmax(dim=1))
