"""A model and a data set in which one rank hangs, is slow, runs out of memory, or calls other collectives than the
other ranks, for tests of what is reported about it. The rank and the step are those of the job or of the script."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

FEATURES = 8
FOREVER_S = 600.0


def is_rank(rank: int) -> bool:
    return int(os.environ.get("RANK", "-1")) == rank  # the command that starts ranks is none


class Block(nn.Module):
    """A layer that does what `fault` says in one forward pass of one rank."""

    def __init__(self, fault: str, rank: int, step: int) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self._fault, self._rank, self._step = fault, rank, step
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self._calls += self.training
        if self._fault and self.training and self._calls == self._step + 1 and "RANK" in os.environ:
            do_fault(self._fault, is_rank(self._rank))
        out: Tensor = torch.relu(self.linear(x))
        return out


def do_fault(fault: str, is_here: bool) -> None:
    """Does what the fault says. `is_here`: this is the rank with the fault."""
    match fault:
        case "hang":
            if is_here:
                time.sleep(FOREVER_S)
        case "skip":
            if not is_here:
                dist.all_reduce(torch.ones(3))
        case "order":
            flag, values = torch.ones(2, dtype=torch.int64), torch.ones(5)
            for tensor in (values, flag) if is_here else (flag, values):
                dist.all_reduce(tensor)
        case "operation":
            dist.broadcast(torch.ones(4), src=0) if is_here else dist.all_reduce(torch.ones(4))
        case "shape":
            dist.all_reduce(torch.ones(700 if is_here else 500))
        case "dtype":
            dist.all_reduce(torch.ones(500, dtype=torch.float64 if is_here else torch.float32))
        case "memory":
            if is_here:
                torch.empty(2**60, dtype=torch.uint8)
        case "gpu memory":
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        case "python memory":
            if is_here:
                bytearray(2**60)
        case _:
            raise AssertionError(fault)


class Net(nn.Module):
    def __init__(self, fault: str = "", rank: int = 1, step: int = 2) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block("", rank, step), Block(fault, rank, step), Block("", rank, step))
        self.head = nn.Linear(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x))
        return out


class Points(Dataset[Any]):
    """Samples of which one takes `seconds` on one rank, or all of them if `sample` is None."""

    def __init__(self, size: int = 640, rank: int = 1, sample: int | None = -1, seconds: float = FOREVER_S) -> None:
        self._size, self._rank, self._sample, self._seconds = size, rank, sample, seconds
        generator = torch.Generator().manual_seed(1)
        self._x = torch.randn(size, FEATURES, generator=generator)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        if self._sample in (None, index) and is_rank(self._rank):
            self.read_slowly()
        return self._x[index], int(self._x[index].sum() > 0)

    def read_slowly(self) -> None:
        time.sleep(self._seconds)
