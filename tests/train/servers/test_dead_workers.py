"""The run continues when a worker dies, with the mean over the samples of the other workers, and lets it join again."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from meshwright.data.order import permutation
from meshwright.errors import CollectiveError
from meshwright.launch.peer_connection import PeerConnection
from tests.train.runs.test_equal_to_one_process import BATCH, Points, assert_equal
from tests.train.servers.in_threads import Died, train_in_threads
from tests.train.servers.server_cases import server_case, server_plan

pytestmark = pytest.mark.usefixtures("loopback")


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("updates", ["synchronous", "asynchronous", "bounded"])
def test_the_run_continues_without_a_dead_worker_until_it_is_back(updates: str, servers: int) -> None:
    """Worker 1 dies before its fourth step, joins again when worker 0 is five steps further, and all finish."""
    dead, revive, rejoined = threading.Event(), threading.Event(), threading.Event()

    def before(worker: int, step: int) -> None:
        if worker == 1 and not revive.is_set() and step == 3:
            dead.set()
            raise Died
        if worker == 1 and revive.is_set():
            rejoined.set()
        if worker == 0 and step == 8:
            assert dead.wait(30)  # without a bound, worker 0 may get here first
            revive.set()
        if worker == 0 and step == 9:
            assert rejoined.wait(30)

    plan = server_plan(2, servers, gradients={"updates": updates, "staleness": 1})
    trained = train_in_threads(server_case("plain", plan, steps=16, before=before, revive=revive))
    assert len(trained.losses) == 16
    assert trained.coordinator.participants.rejoined == 1
    printed = " ".join(trained.printed)
    assert "worker 1 is gone after step" in printed
    assert "worker 1 is back, at batch" in printed
    if updates == "synchronous":
        assert "the mean is over the samples of the others" in printed
        assert all(torch.equal(value, trained.weights[1][name]) for name, value in trained.weights[0].items())


def test_the_mean_is_over_the_gradients_that_arrived() -> None:
    """Without worker 1, a step trains on the first half of its batch."""

    def before(worker: int, step: int) -> None:
        if worker == 1:
            raise Died

    points = Points("tuple")
    case = server_case("own loss", server_plan(2, 1), steps=1, before=before)
    weights = train_in_threads(case).weights[0]
    first_half = permutation(case.seed, 0, len(points))[: BATCH // 2]
    model, make_optimizer = case.make()
    optimizer = make_optimizer(dict(model.named_parameters()))
    case.loss(model(points.x[first_half]), points.y[first_half]).backward()
    optimizer.step()
    assert_equal((weights, []), (model.state_dict(), []))


def test_a_dead_peer_is_named() -> None:
    for closes, message in ((False, "receive: no answer within 1 s from"), (True, "receive: the connection to")):
        store = dist.HashStore()
        with ThreadPoolExecutor(1) as pool:  # each end waits for the other one
            worker_end = pool.submit(PeerConnection, store, False, "server 0 (rank 2)", 5.0)
            server_end = PeerConnection(store, True, "worker 1 (rank 1)", 1.0)
        connection = worker_end.result()
        if closes:
            connection.close()
        with pytest.raises(CollectiveError, match=rf"{message} worker 1 \(rank 1\)"):
            server_end.receive(torch.zeros(1))
