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


def second_derivatives(rank: int, world_size: int) -> None:
    """A column-parallel and a row-parallel layer, whose output is differentiated by the input, and that by the weights:
    through an all-reduce and its gradient, and through sums, slices and gathered shards."""
    group, ranges = world_group(rank, world_size), UNEVEN
    torch.manual_seed(0)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    into, out = torch.randn(3, 9, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    full_into, full_out = into.clone().requires_grad_(), out.clone().requires_grad_()
    own_into = collectives.slice_of_rank(into, ranges, rank).requires_grad_()
    own_out = collectives.slice_of_rank(out.T, ranges, rank).T.clone().requires_grad_()

    def loss_of_derivative(y: torch.Tensor) -> torch.Tensor:
        (derivative,) = torch.autograd.grad(y.tanh().sum(), x, create_graph=True)
        return derivative.square().sum()

    loss_of_derivative((x @ full_into).tanh() @ full_out).backward()
    expected = [collectives.slice_of_rank(_grad(full_into), ranges, rank)]
    expected += [collectives.slice_of_rank(_grad(full_out).T, ranges, rank).T]

    hidden = (collectives.all_reduce_gradient(x, group) @ own_into).tanh()
    loss_of_derivative(collectives.all_reduce(hidden @ own_out, group)).backward()
    torch.testing.assert_close([_grad(own_into), _grad(own_out)], expected)

    own_into.grad = own_out.grad = None
    gathered = collectives.all_gather_for_sharded_work(
        collectives.slice_own_shard(x.tile(1, 3), ranges, group), ranges, group
    )
    hidden = (gathered[:, :3] @ own_into).tanh()
    scattered = collectives.reduce_scatter(hidden @ own_out.tile(1, 3)[:, :9], ranges, group)
    y = collectives.all_gather_for_replicated_work(scattered, ranges, group)[:, :4]
    loss_of_derivative(y).backward()
    torch.testing.assert_close([_grad(own_into), _grad(own_out)], expected)


def test_the_gradient_of_a_collective_can_be_differentiated_again(three: RankPool) -> None:
    three.run(second_derivatives)
