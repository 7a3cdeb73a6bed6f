"""Rows reach the ranks of their experts and return, with their gradients, also where a rank has nothing to send."""

import torch
import torch.distributed as dist

from meshwright.parallel.differentiable_collectives import AxisGroup
from meshwright.parallel.expert import exchange
from meshwright.parallel.expert.exchange import exchange_counts, exchange_rows
from tests.ranks import RankPool

SENT = ([3, 0, 1, 2], [0, 0, 0, 0])  # rows of each rank for four experts


def exchange_both_ways(rank: int, size: int) -> None:
    assert dist.group.WORLD is not None
    group = AxisGroup(dist.group.WORLD, rank, size, "expert")
    sent = torch.tensor(SENT[rank])
    counts = exchange_counts(sent, group)
    assert counts.sent == tuple(SENT[rank])
    assert counts.received == tuple(tuple(SENT[other][2 * rank : 2 * rank + 2]) for other in range(size))
    send, receive = counts.rows_to_ranks, counts.rows_from_ranks
    rows = (torch.arange(sum(send) * 2.0).view(-1, 2) + 10 * rank).requires_grad_()
    received = exchange_rows(rows, send, receive, group)
    assert len(received) == sum(receive) == 3
    returned = exchange_rows(received * (rank + 1), receive, send, group)
    returned.sum().backward()
    factors = torch.tensor([1.0] * send[0] + [2.0] * send[1])[:, None]
    assert torch.equal(returned, rows * factors)
    assert rows.grad is not None
    assert torch.equal(rows.grad, factors.expand_as(rows))
    gathered = exchange._all_to_all_by_gathering(rows.detach(), send, group)
    assert torch.equal(gathered, received.detach())


def test_rows_and_gradients_go_there_and_back(two: RankPool) -> None:
    two.run(exchange_both_ways)
