"""Small models in fp64 and the loops of plain PyTorch that sessions are compared with."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from meshwright.plan import Plan

TOLERANCE = 1e-9
AXES = ["replicate", "shard"]


class Blocks(nn.Module):
    """Layers of equal blocks, which a sharded model gathers one by one."""

    def __init__(self, inputs: int, outputs: int, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.last(x)
        return out


def model(inputs: int, outputs: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Blocks(inputs, outputs).double()


def pairs(size: int = 14, inputs: int = 5, outputs: int = 4) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(size, inputs, generator=generator, dtype=torch.float64)
    return TensorDataset(first, torch.randn(size, outputs, generator=generator, dtype=torch.float64))


def unseeded_points(size: int) -> Dataset[Any]:
    """A data set that is another one on each rank."""
    generator = torch.Generator()
    generator.seed()
    return TensorDataset(torch.randn(size, 20, generator=generator), torch.zeros(size, dtype=torch.long))


def shuffled(dataset: Dataset[Any], batch: int = 4, **options: Any) -> "DataLoader[Any]":
    """A loader whose last batch is shorter than the others."""
    generator = torch.Generator().manual_seed(5)
    return DataLoader(dataset, batch_size=batch, shuffle=True, generator=generator, **options)


def plan_of(axis: str, size: int, **groups: Any) -> Plan:
    return Plan.model_validate({"axes": {axis: size}, **groups})


def assert_close(found: Any, expected: Any) -> None:
    """Compares losses, or weights by name."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.allclose(found[name], tensor, rtol=TOLERANCE, atol=TOLERANCE), name
    else:
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=TOLERANCE, atol=TOLERANCE)
