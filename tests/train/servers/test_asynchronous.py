"""Asynchronous and bounded updates: gradients are applied as they arrive, the staleness is measured, and no worker gets
further ahead than the bound."""

import threading

import pytest
import torch
from torch import nn

from meshwright.train.servers.clocks import WorkerClocks
from meshwright.train.servers.momentum import PerWorkerMomentum
from tests.train.servers.in_threads import train_in_threads
from tests.train.servers.server_cases import server_case, server_plan

pytestmark = pytest.mark.usefixtures("loopback")


@pytest.mark.parametrize("servers", [1, 2])
def test_asynchronous_gradients_are_applied_as_they_arrive(servers: int) -> None:
    trained = train_in_threads(
        server_case("plain", server_plan(2, servers, gradients={"updates": "asynchronous"}), steps=20)
    )
    assert len(trained.losses) == 20
    assert trained.coordinator.version == trained.coordinator.staleness.pushes == 40
    assert 0 < trained.coordinator.staleness.mean <= trained.coordinator.staleness.largest
    assert sum(trained.losses[-5:]) < sum(trained.losses[:5])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_stays_stable_under_asynchrony(momentum: float) -> None:
    """Two workers take turns to minimize 10 x², and each gradient is one update late. With one momentum for both
    workers, x would grow without bound, because 0.9 + 0.01 · 20 > 1. The expected values are computed here as in the
    paper."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.02, momentum=momentum)
    if not momentum:
        assert not PerWorkerMomentum.applies_to(optimizer)
        return
    assert PerWorkerMomentum.applies_to(optimizer)
    per_worker = PerWorkerMomentum(optimizer, rate=0.5)
    x, momenta, sent_weights = 1.0, [0.0, 0.0], [1.0, 1.0]
    for turn in range(200):
        worker = turn % 2
        weight.grad = torch.tensor([20 * sent_weights[worker]], dtype=torch.float64)
        optimizer.param_groups[0]["lr"] = 0.01
        with per_worker.of_worker(worker):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.02
        momenta[worker] = momentum * momenta[worker] + 20 * sent_weights[worker]
        x -= 0.01 * momenta[worker]
        assert float(weight.detach()) == pytest.approx(x, rel=1e-9, abs=1e-12)
        sent_weights[worker] = float(per_worker.look_ahead()[weight])
        assert sent_weights[worker] == pytest.approx(x - 0.01 * momentum * sum(momenta), rel=1e-9, abs=1e-12)
    assert abs(x) < 1e-3
    assert float(optimizer.state[weight]["momentum_buffer"]) == pytest.approx(sum(momenta) / 2, abs=1e-9)


@pytest.mark.parametrize(("bound", "servers"), [(0, 1), (1, 2), (3, 1)])
def test_no_worker_is_further_ahead_than_the_bound(bound: int, servers: int) -> None:
    """Worker 0 waits before its third step until the others have begun the last one that they are allowed. When it goes
    on, none of them may have begun another."""
    begun = [0, 0, 0]
    furthest = threading.Barrier(3)
    largest_begun: list[int] = []

    def before(worker: int, step: int) -> None:
        begun[worker] = step
        if step == (2 if worker == 0 else 2 + bound):
            furthest.wait(30)
        if worker == 0 and step == 2:
            largest_begun.append(max(begun))

    plan = server_plan(3, servers, gradients={"updates": "bounded", "staleness": bound})
    trained = train_in_threads(server_case("plain", plan, steps=12, before=before))
    assert trained.coordinator.clocks.largest_lead == bound
    assert largest_begun == [2 + bound]
    assert len(trained.losses) == 12


def test_a_reply_beyond_the_bound_is_an_assertion_error() -> None:
    clocks = WorkerClocks(bound=1)
    clocks.add(0, 4)
    clocks.add(1, 6)
    assert not clocks.may_continue(1)
    with pytest.raises(AssertionError, match="2 steps ahead, 1 allowed"):
        clocks.note_continued(1)
    clocks.remove(0)  # a dead worker does not hold the other workers back
    clocks.note_continued(1)
    assert clocks.add(0) == 6, "a worker that comes back gets the clock of the slowest"


def test_a_step_of_the_run_is_complete_when_all_shares_of_one_batch_are() -> None:
    clocks = WorkerClocks(total=3)
    for worker in range(3):
        clocks.add(worker, 0)
    steps = []
    for worker in (0, 0, 1, 0, 1, 2, 1, 2, 2):
        clocks.advance(worker)
        steps.append(clocks.step)
    assert steps == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert clocks.all_finished
