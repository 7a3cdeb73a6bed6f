"""Our own averaging of gradients trains as one process and as DDP do, and sends nothing before the last microbatch."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.collectives.native import Native
from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.replicate.combine import combine, lay_buckets
from meshwright.parallel.replicate.replicate import align_buffers, replicate
from meshwright.plan import Plan
from tests.parallel.mixed import Trained, assert_same, batch, loss_of, mixed, optimizer_of, train_alone
from tests.ranks import RankPool
from tests.soaked import all_but


def with_buckets(size: int) -> Plan:
    return Plan.model_validate({"gradients": {"bucket_bytes": size}})


def train(rank: int, size: int, axes: dict[str, int], bucket_bytes: int, overlap: bool) -> Trained:
    mesh = build_mesh(Plan.model_validate({"axes": axes}), "cpu", size)
    assert mesh is not None
    model = mixed()
    combiner = combine(model, Native(mesh.get_group("replicate")), bucket_bytes, overlap=overlap)
    optimizer = optimizer_of(model)
    data_rank = mesh.get_local_rank("replicate")
    for step in range(3):
        optimizer.zero_grad()
        align_buffers(model, mesh)
        for microbatch in range(2):
            if overlap:
                with combiner.combining(last=microbatch == 1):
                    loss_of(model, batch(step, data_rank, microbatch)).backward()
            else:
                loss_of(model, batch(step, data_rank, microbatch)).backward()
        if not overlap:
            combiner.finish()
        optimizer.step()
    align_buffers(model, mesh)
    return dict(model.state_dict()), gradients_of(model)


@pytest.mark.parametrize("bucket_bytes", all_but([500], [1, 500, 10**6]))
@pytest.mark.parametrize("overlap", [True, False])
def test_it_trains_as_one_process(two: RankPool, bucket_bytes: int, overlap: bool) -> None:
    expected = train_alone(3, 2, 2)
    for state, gradients in two.run(train, {"replicate": 2}, bucket_bytes, overlap):
        assert_same(state, expected[0])
        assert_same(gradients, expected[1])


def test_beside_a_tensor_axis(four: RankPool) -> None:
    expected = train_alone(3, 2, 2)
    for state, gradients in four.run(train, {"replicate": 2, "tensor": 2}, 500, True):
        assert_same(state, expected[0])
        assert_same(gradients, expected[1])


def like_ddp(rank: int, size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    mesh = build_mesh(Plan.model_validate({"axes": {"replicate": size}}), "cpu", size)
    assert mesh is not None
    ours, theirs = mixed().float(), mixed().float()
    combiner = combine(ours, Native(mesh.get_group()), 500)
    runner = replicate(theirs, mesh, with_buckets(500), Native(mesh.get_group()))
    x = batch(0, rank, 0).float()
    with combiner.combining(last=True):
        loss_of(ours, x).backward()
    loss_of(runner, x).backward()
    return gradients_of(ours), gradients_of(theirs)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_are_bitwise_those_of_ddp(two: RankPool) -> None:
    """On two ranks: sums of two do not depend on the order, nor halves on when they are taken."""
    for ours, theirs in two.run(like_ddp):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def sent(rank: int, size: int) -> tuple[int, int, int, int]:
    """Buckets sent in an earlier microbatch, in the last one's backward, and behind it; and how many there are."""
    mesh = build_mesh(Plan.model_validate({"axes": {"replicate": size}}), "cpu", size)
    assert mesh is not None
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    combiner = combine(model, Native(mesh.get_group()), 300)
    counts = []
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as spy:
        for last in (False, True):
            with combiner.combining(last):
                model(torch.ones(2, 8)).sum().backward()
                counts.append(spy.call_count)
        counts.append(spy.call_count)
    return counts[0], counts[1], counts[2], len(lay_buckets(model.parameters(), 300))


def test_buckets_travel_while_the_last_backward_runs(two: RankPool) -> None:
    earlier, within, all_of_them, buckets = two.run(sent)[0]
    assert (earlier, within, all_of_them) == (0, buckets, buckets)
    assert buckets >= 4


def skipped(rank: int, size: int) -> tuple[float, float, float]:
    mesh = build_mesh(Plan.model_validate({"axes": {"replicate": size}}), "cpu", size)
    assert mesh is not None
    found = []
    for ours in (True, False):
        first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        model = nn.Sequential(first, second)
        nn.init.ones_(first.weight)
        nn.init.constant_(second.weight, float(rank + 1))  # a part of a wide layer, not a copy
        if ours:
            combiner = combine(model, Native(mesh.get_group()), 300, skip={"1.weight"})
            with combiner.combining(last=True):
                model(torch.full((1, 1), rank + 1.0)).backward()
        else:
            runner = replicate(model, mesh, with_buckets(300), Native(mesh.get_group()), {"1.weight"})
            runner(torch.full((1, 1), rank + 1.0)).backward()
        assert first.weight.grad is not None
        assert second.weight.grad is not None
        found.append((float(first.weight.grad), float(second.weight.grad), float(second.weight.detach())))
    assert found[0] == found[1]
    return found[0]


def test_parameters_can_be_left_out_here_and_of_ddp(two: RankPool) -> None:
    first, second = two.run(skipped)
    assert first == (2.5, 1.0, 1.0)
    assert second == (2.5, 2.0, 2.0)


def test_buckets_are_of_one_dtype_in_reverse_order() -> None:
    shapes = [(10, torch.float32), (20, torch.float64), (30, torch.float32), (40, torch.float32)]
    parameters = [nn.Parameter(torch.zeros(n, dtype=t)) for n, t in shapes]
    assert [[p.numel() for p in bucket] for bucket in lay_buckets(parameters, 200)] == [[40, 30], [20], [10]]
