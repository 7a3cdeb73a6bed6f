"""Our own averaging of gradients gives what one process and DDP give, and sends nothing before the last microbatch."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.collectives.native import NativeReducer
from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.replicate.gradient_averaging import assign_buckets, gradient_averager
from meshwright.parallel.replicate.replicate import broadcast_buffers, replicate
from meshwright.plan import Plan
from tests.parallel.mixed import (
    StateAndGradients,
    assert_equal_tensors,
    batch,
    loss_of,
    mixed,
    optimizer_of,
    train_in_one_process,
)
from tests.ranks import RankPool
from tests.soaked import all_but


def with_buckets(size: int) -> Plan:
    return Plan.model_validate({"gradients": {"bucket_bytes": size}})


def train(rank: int, size: int, axes: dict[str, int], bucket_bytes: int, overlap: bool) -> StateAndGradients:
    mesh = build_mesh(Plan.model_validate({"axes": axes}), "cpu", size)
    assert mesh is not None
    model = mixed()
    averager = gradient_averager(model, NativeReducer(mesh.get_group("replicate")), bucket_bytes, overlap=overlap)
    optimizer = optimizer_of(model)
    data_rank = mesh.get_local_rank("replicate")
    for step in range(3):
        optimizer.zero_grad()
        broadcast_buffers(model, mesh)
        for microbatch in range(2):
            if overlap:
                with averager.averaging(last=microbatch == 1):
                    loss_of(model, batch(step, data_rank, microbatch)).backward()
            else:
                loss_of(model, batch(step, data_rank, microbatch)).backward()
        if not overlap:
            averager.finish()
        optimizer.step()
    broadcast_buffers(model, mesh)
    return dict(model.state_dict()), gradients_of(model)


@pytest.mark.parametrize("bucket_bytes", all_but([500], [1, 500, 10**6]))
@pytest.mark.parametrize("overlap", [True, False])
def test_training_equals_one_process(two: RankPool, bucket_bytes: int, overlap: bool) -> None:
    expected = train_in_one_process(3, 2, 2)
    for state, gradients in two.run(train, {"replicate": 2}, bucket_bytes, overlap):
        assert_equal_tensors(state, expected[0])
        assert_equal_tensors(gradients, expected[1])


def test_training_next_to_a_tensor_axis_equals_one_process(four: RankPool) -> None:
    expected = train_in_one_process(3, 2, 2)
    for state, gradients in four.run(train, {"replicate": 2, "tensor": 2}, 500, True):
        assert_equal_tensors(state, expected[0])
        assert_equal_tensors(gradients, expected[1])


def gradients_of_both(rank: int, size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    mesh = build_mesh(Plan.model_validate({"axes": {"replicate": size}}), "cpu", size)
    assert mesh is not None
    ours, theirs = mixed().float(), mixed().float()
    averager = gradient_averager(ours, NativeReducer(mesh.get_group()), 500)
    runner = replicate(theirs, mesh, with_buckets(500), NativeReducer(mesh.get_group()))
    x = batch(0, rank, 0).float()
    with averager.averaging(last=True):
        loss_of(ours, x).backward()
    loss_of(runner, x).backward()
    return gradients_of(ours), gradients_of(theirs)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_are_bitwise_those_of_ddp(two: RankPool) -> None:
    """On two ranks, where rounding depends neither on the order of a sum nor on when it is halved."""
    for ours, theirs in two.run(gradients_of_both):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def count_sent_buckets(rank: int, size: int) -> tuple[int, int, int, int]:
    """Numbers of buckets: sent until the end of the first microbatch, until the end of the last backward pass, in the
    end; and of all buckets."""
    mesh = build_mesh(Plan.model_validate({"axes": {"replicate": size}}), "cpu", size)
    assert mesh is not None
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    averager = gradient_averager(model, NativeReducer(mesh.get_group()), 300)
    counts = []
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as spy:
        for last in (False, True):
            with averager.averaging(last):
                model(torch.ones(2, 8)).sum().backward()
                counts.append(spy.call_count)
        counts.append(spy.call_count)
    return counts[0], counts[1], counts[2], len(assign_buckets(model.parameters(), 300))


def test_buckets_are_sent_during_the_last_backward_pass(two: RankPool) -> None:
    in_first, in_last_backward, in_the_end, buckets = two.run(count_sent_buckets)[0]
    assert (in_first, in_last_backward, in_the_end) == (0, buckets, buckets)
    assert buckets >= 4


def train_with_skipped_parameter(rank: int, size: int) -> tuple[float, float, float]:
    mesh = build_mesh(Plan.model_validate({"axes": {"replicate": size}}), "cpu", size)
    assert mesh is not None
    results = []
    for ours in (True, False):
        first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        model = nn.Sequential(first, second)
        nn.init.ones_(first.weight)
        nn.init.constant_(second.weight, float(rank + 1))  # a shard of a wide layer, which differs between ranks
        if ours:
            averager = gradient_averager(model, NativeReducer(mesh.get_group()), 300, skip={"1.weight"})
            with averager.averaging(last=True):
                model(torch.full((1, 1), rank + 1.0)).backward()
        else:
            runner = replicate(model, mesh, with_buckets(300), NativeReducer(mesh.get_group()), {"1.weight"})
            runner(torch.full((1, 1), rank + 1.0)).backward()
        assert first.weight.grad is not None
        assert second.weight.grad is not None
        results.append((float(first.weight.grad), float(second.weight.grad), float(second.weight.detach())))
    assert results[0] == results[1]
    return results[0]


def test_parameters_can_be_skipped_as_in_ddp(two: RankPool) -> None:
    first, second = two.run(train_with_skipped_parameter)
    assert first == (2.5, 1.0, 1.0)
    assert second == (2.5, 2.0, 2.0)


def test_buckets_have_one_dtype_and_reverse_order() -> None:
    shapes = [(10, torch.float32), (20, torch.float64), (30, torch.float32), (40, torch.float32)]
    parameters = [nn.Parameter(torch.zeros(n, dtype=t)) for n, t in shapes]
    assert [[p.numel() for p in bucket] for bucket in assign_buckets(parameters, 200)] == [[40, 30], [20], [10]]
