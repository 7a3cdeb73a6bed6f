"""Every collective and its gradient give what one process would compute, also where ranks hold unequal shards."""

import pytest
import torch
import torch.distributed as dist

from meshwright.parallel import differentiable_collectives as collectives
from meshwright.parallel.differentiable_collectives import AxisGroup, ShardRanges, consecutive_ranges
from tests.ranks import RankPool

FUSED = ShardRanges(1, 9, (((0, 2), (5, 2)), ((2, 2), (7, 1)), ((4, 1), (8, 1))))
UNEVEN = consecutive_ranges(1, (4, 5, 0))


def world_group(rank: int, world_size: int) -> AxisGroup:
    process_group = dist.group.WORLD
    assert process_group is not None
    return AxisGroup(process_group, rank, world_size)


def check_collectives(rank: int, world_size: int, ranges: ShardRanges) -> None:
    group = world_group(rank, world_size)
    torch.manual_seed(0)
    full = torch.randn(2, 9, dtype=torch.float64)
    gradients = torch.randn(world_size, 2, 9, dtype=torch.float64)  # of the full tensor, one for each rank
    shard = collectives.slice_of_rank(full, ranges, rank)

    x = full.clone().requires_grad_()
    collectives.all_reduce_gradient(x, group).backward(gradients[rank])
    assert torch.allclose(_grad(x), gradients.sum(0))

    x = gradients[rank].clone().requires_grad_()
    result = collectives.all_reduce(x, group)
    assert torch.allclose(result, gradients.sum(0))
    result.backward(full)
    assert torch.equal(_grad(x), full)

    x = full.clone().requires_grad_()
    result = collectives.slice_own_shard(x, ranges, group)
    assert torch.equal(result, shard)
    result.backward(collectives.slice_of_rank(gradients[0], ranges, rank))
    assert torch.equal(_grad(x), gradients[0])

    for all_gather, expected in (
        (collectives.all_gather_for_replicated_work, gradients[rank]),
        (collectives.all_gather_for_sharded_work, gradients.sum(0)),
    ):
        x = shard.clone().requires_grad_()
        result = all_gather(x, ranges, group)
        assert torch.equal(result, full)
        result.backward(gradients[rank])
        assert torch.allclose(_grad(x), collectives.slice_of_rank(expected, ranges, rank))

    x = gradients[rank].clone().requires_grad_()
    result = collectives.reduce_scatter(x, ranges, group)
    assert torch.allclose(result, collectives.slice_of_rank(gradients.sum(0), ranges, rank))
    result.backward(shard)
    assert torch.equal(_grad(x), full)

    rows = consecutive_ranges(0, (1, 0, 1))
    x = shard.clone().requires_grad_()
    result = collectives.all_to_all(x, ranges, rows, group)
    assert torch.equal(result, collectives.slice_of_rank(full, rows, rank))
    result.backward(collectives.slice_of_rank(gradients[0], rows, rank))
    assert torch.equal(_grad(x), collectives.slice_of_rank(gradients[0], ranges, rank))


def _grad(x: torch.Tensor) -> torch.Tensor:
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("ranges", [FUSED, UNEVEN])
def test_every_collective_and_its_gradient(three: RankPool, ranges: ShardRanges) -> None:
    three.run(check_collectives, ranges)


def reduce_scatter_bf16(rank: int, world_size: int) -> float:
    x = torch.full((2, 3), float(rank + 1), dtype=torch.bfloat16)
    ranges = consecutive_ranges(1, (1, 1, 1))
    return float(collectives.reduce_scatter(x, ranges, world_group(rank, world_size)).sum())


def test_bf16_is_reduced_without_a_cast(three: RankPool) -> None:
    assert three.run(reduce_scatter_bf16) == [12.0] * 3
