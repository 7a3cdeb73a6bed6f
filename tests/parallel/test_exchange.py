"""What ranks hand each other, forward and backward, is what one rank would compute; also where shares are uneven."""

import pytest
import torch
import torch.distributed as dist

from meshwright.parallel import exchange
from meshwright.parallel.exchange import Division, Team, even
from tests.ranks import RankPool

FUSED = Division(1, 9, (((0, 2), (5, 2)), ((2, 2), (7, 1)), ((4, 1), (8, 1))))
UNEVEN = even(1, (4, 5, 0))


def there_and_back(rank: int, world_size: int, division: Division) -> None:
    group = dist.group.WORLD
    assert group is not None
    team = Team(group, rank, world_size)
    torch.manual_seed(0)
    whole = torch.randn(2, 9, dtype=torch.float64)
    wishes = torch.randn(world_size, 2, 9, dtype=torch.float64)  # each rank's gradient of the whole
    own = exchange.take(whole, division, rank)

    x = whole.clone().requires_grad_()
    exchange.copy_in(x, team).backward(wishes[rank])
    assert torch.allclose(_grad(x), wishes.sum(0))

    x = wishes[rank].clone().requires_grad_()
    found = exchange.sum_out(x, team)
    assert torch.allclose(found, wishes.sum(0))
    found.backward(whole)
    assert torch.equal(_grad(x), whole)

    x = whole.clone().requires_grad_()
    found = exchange.scatter(x, division, team)
    assert torch.equal(found, own)
    found.backward(exchange.take(wishes[0], division, rank))
    assert torch.equal(_grad(x), wishes[0])

    for join, wanted in ((exchange.gather, wishes[rank]), (exchange.gather_in, wishes.sum(0))):
        x = own.clone().requires_grad_()
        found = join(x, division, team)
        assert torch.equal(found, whole)
        found.backward(wishes[rank])
        assert torch.allclose(_grad(x), exchange.take(wanted, division, rank))

    x = wishes[rank].clone().requires_grad_()
    found = exchange.sum_scatter(x, division, team)
    assert torch.allclose(found, exchange.take(wishes.sum(0), division, rank))
    found.backward(own)
    assert torch.equal(_grad(x), whole)

    rows = even(0, (1, 0, 1))
    x = own.clone().requires_grad_()
    found = exchange.swap(x, division, rows, team)
    assert torch.equal(found, exchange.take(whole, rows, rank))
    found.backward(exchange.take(wishes[0], rows, rank))
    assert torch.equal(_grad(x), exchange.take(wishes[0], division, rank))


def _grad(x: torch.Tensor) -> torch.Tensor:
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("division", [FUSED, UNEVEN])
def test_every_exchange_and_its_gradient(three: RankPool, division: Division) -> None:
    three.run(there_and_back, division)


def half_precision(rank: int, world_size: int) -> float:
    group = dist.group.WORLD
    assert group is not None
    team = Team(group, rank, world_size)
    x = torch.full((2, 3), float(rank + 1), dtype=torch.bfloat16)
    return float(exchange.sum_scatter(x, even(1, (1, 1, 1)), team).sum())


def test_bf16_travels_as_it_is(three: RankPool) -> None:
    assert three.run(half_precision) == [12.0] * 3
