"""The run continues when a worker dies, with the mean over the samples of the other workers, and lets it join again."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from meshwright.data.order import permutation
from meshwright.errors import CollectiveError
from meshwright.messages.plain_values import to_text
from meshwright.processes.peer_connection import PeerConnection
from meshwright.train.servers.clocks import WorkerClocks
from meshwright.train.servers.connections import Connection
from meshwright.train.servers.messages import ReportKind, WorkerReport
from meshwright.train.servers.participants import Participants
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


class Executing:
    """Its pickle executes code in the process that reads it."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("it was executed",))


TOTALS = {"loss": torch.tensor([1.0, 2.0], dtype=torch.float64)}


@pytest.mark.parametrize(
    "sent",
    [b"", b"nonsense", pickle.dumps(Executing()), pickle.dumps((False, TOTALS))]
    + [to_text(value).encode() for value in (None, (1, TOTALS), (False,), (False, {"loss": 1}), (False, [1]))],
)
def test_a_worker_whose_evaluation_result_cannot_be_read_is_dropped(sent: bytes) -> None:
    connections = {worker: Connection(worker, 1, cast(Any, None), cast(Any, None)) for worker in (0, 1)}
    printed: list[str] = []
    fake_connections = cast(Any, SimpleNamespace(by_worker=connections))
    participants = Participants(fake_connections, WorkerClocks(), 2, "synchronous", 5.0, printed.append)
    assert participants.admit_new() == [0, 1]
    for worker, data in ((0, to_text((True, TOTALS)).encode()), (1, sent)):
        connections[worker].report = WorkerReport(kind=ReportKind.EVALUATED)
        connections[worker].evaluation_result, connections[worker].report_number = data, 1
    assert participants.read_reports() == {1: 1}
    assert participants.admitted == {0: 1}
    assert participants.evaluations.keys() == {0}
    interrupted, totals = participants.evaluations[0]
    assert interrupted
    assert torch.equal(totals["loss"], TOTALS["loss"])
    first, second = printed
    assert first.startswith("worker 1 is dropped: its evaluation result cannot be read: ")
    assert second == "worker 1 is gone after step 0: the mean is over the samples of the others"
