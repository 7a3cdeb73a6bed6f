"""A small model with dropout and a small data set, for jobs that tests train and break."""

import time

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


class PacedNet(Net):
    """The same model, whose forward passes and saves take long enough for another process to see them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_pre_hook(lambda *_: time.sleep(0.1))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.005)
        return super().forward(x)


def points(size: int = 510) -> Dataset[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    rule = torch.randn(20, 5, generator=generator)
    x = torch.randn(size, 20, generator=generator)
    return TensorDataset(x, (x @ rule).argmax(dim=1))
