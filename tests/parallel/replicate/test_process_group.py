"""DDP on a group whose small sums go through shared memory: parameters that a step leaves out are still told apart."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.collectives.sums import SharedSums
from meshwright.parallel.replicate.process_group import Beside
from tests.ranks import run_ranks


class Choosing(nn.Module):
    """Uses `a` or `b`; BatchNorm has buffers, which DDP sends around."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor, first: bool) -> Tensor:
        return self.norm((self.a if first else self.b)(x))


def _gradients(rank: int, world_size: int) -> list[Any]:
    group = dist.group.WORLD
    assert group is not None
    counted: list[torch.dtype] = []

    class Counting(SharedSums):
        def start(self, numbers: Tensor) -> Any:
            counted.append(numbers.dtype)
            return super().start(numbers)

    found = []
    for given in (group, Beside(group, Counting(group))):
        torch.manual_seed(rank)
        x = torch.randn(4, 3)
        torch.manual_seed(0)
        model = DistributedDataParallel(
            Choosing(), process_group=given, find_unused_parameters=True, gradient_as_bucket_view=True
        )
        steps = []
        # Both ranks use a; then rank 0 uses a and rank 1 b; then nobody uses a.
        for first in (True, rank == 0, False):
            model.zero_grad(set_to_none=True)
            model(x, first).square().sum().backward()
            steps.append({name: None if p.grad is None else p.grad.tolist() for name, p in model.named_parameters()})
        found.append((steps, model.module.norm.running_mean.tolist()))
    return [found, counted]


def test_gradients_are_those_of_the_group_itself() -> None:
    for (plain, beside), counted in run_ranks(_gradients, 2):
        assert beside == plain
        assert counted == [torch.int64] * 3  # every step's sum went that way
        steps, _ = beside
        assert steps[0]["module.b.weight"] is None
        assert steps[1]["module.b.weight"] is not None
        assert steps[2]["module.a.weight"] is None
