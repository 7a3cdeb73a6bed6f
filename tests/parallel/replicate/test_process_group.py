"""DDP on a group whose small sums go through shared memory: it still finds the parameters that a step does not use."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.collectives.small_sums import SharedMemorySums
from meshwright.parallel.replicate.process_group import GroupWithSharedSums
from tests.ranks import run_ranks


class UsesOneLayer(nn.Module):
    """Uses `a` or `b`. BatchNorm has buffers, which DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor, first: bool) -> Tensor:
        return self.norm((self.a if first else self.b)(x))


def _gradients(rank: int, world_size: int) -> list[Any]:
    group = dist.group.WORLD
    assert group is not None
    summed_dtypes: list[torch.dtype] = []

    class CountingSums(SharedMemorySums):
        def start(self, numbers: Tensor) -> Any:
            summed_dtypes.append(numbers.dtype)
            return super().start(numbers)

    results = []
    for process_group in (group, GroupWithSharedSums(group, CountingSums(group))):
        torch.manual_seed(rank)
        x = torch.randn(4, 3)
        torch.manual_seed(0)
        model = DistributedDataParallel(
            UsesOneLayer(), process_group=process_group, find_unused_parameters=True, gradient_as_bucket_view=True
        )
        steps = []
        # Both ranks use a; then rank 0 uses a and rank 1 b; then nobody uses a.
        for first in (True, rank == 0, False):
            model.zero_grad(set_to_none=True)
            model(x, first).square().sum().backward()
            steps.append({name: None if p.grad is None else p.grad.tolist() for name, p in model.named_parameters()})
        results.append((steps, model.module.norm.running_mean.tolist()))
    return [results, summed_dtypes]


def test_gradients_equal_those_on_the_ordinary_group() -> None:
    for (plain, shared), summed_dtypes in run_ranks(_gradients, 2):
        assert shared == plain
        assert summed_dtypes == [torch.int64] * 3  # one sum through shared memory in every step
        steps, _ = shared
        assert steps[0]["module.b.weight"] is None
        assert steps[1]["module.b.weight"] is not None
        assert steps[2]["module.a.weight"] is None
