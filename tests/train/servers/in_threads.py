"""Runs servers and workers as threads of one process: with the real protocol, but without starting processes."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.data.batch import Batch
from meshwright.data.loading import SampleShare
from meshwright.plan import Plan
from meshwright.processes.loopback import ADDRESS, connect_store, serve_store
from meshwright.processes.peer_connection import ConnectToStore
from meshwright.processes.world import World
from meshwright.train.servers.coordinator import Coordinator
from meshwright.train.servers.server import Server
from meshwright.train.servers.server_group import ServerGroup
from meshwright.train.servers.training_spec import TrainingSpec, worker_plan
from meshwright.train.servers.worker import ServerClient, run_worker
from meshwright.train.session import Session

TIMEOUT_S = 60.0
_BUILDING = threading.Lock()  # threads share the generators that initial weights are drawn from
ONE_RANK = World(0, 0, 1, 1, 0, torch.device("cpu"), None)


class Died(Exception):
    """Makes a worker close its connections without a message, as if it had died."""


@dataclass
class Case:
    """A training run. `make` returns a new model and a function that makes its optimizer. A worker calls `before`
    before each of its steps. A worker that died comes back when `revive` is set, and never when it is None."""

    make: Callable[[], tuple[nn.Module, Any]]
    data: Any
    loss: Any
    global_batch: int
    plan: Plan
    steps: int
    clip_norm: float | None = None
    schedule: Any = None
    seed: int = 5
    before: Callable[[int, int], None] = lambda worker, step: None
    revive: threading.Event | None = None


@dataclass
class TrainingResult:
    """The result of a run: the first server, the losses and learning rates of its steps, every worker's last weights,
    and the lines that were printed."""

    servers: list[Server] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)

    @property
    def coordinator(self) -> Coordinator:
        return self.servers[0].coordinator


def train_in_threads(case: Case) -> TrainingResult:
    store, port = serve_store()
    trained = TrainingResult()

    def connect() -> dist.Store:
        return connect_store(ADDRESS, port, timedelta(seconds=TIMEOUT_S))

    errors: list[BaseException] = []
    threads = [
        *(_thread(errors, _serve, case, server, connect, trained) for server in range(case.plan.gradients.servers)),
        *(_thread(errors, _work, case, worker, connect, trained) for worker in range(case.plan.world_size)),
    ]
    deadline = time.monotonic() + TIMEOUT_S
    while not errors and any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        time.sleep(0.005)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "some thread still waits"
    del store  # the threads used it until here
    return trained


def _thread(errors: list[BaseException], target: Callable[..., None], *arguments: Any) -> threading.Thread:
    def run() -> None:
        try:
            target(*arguments)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def spec_of(case: Case) -> TrainingSpec:
    with _BUILDING:
        model, make_optimizer = case.make()
    return TrainingSpec(model, make_optimizer, case.schedule, "step", case.clip_norm, case.seed)


def _serve(case: Case, server: int, connect: ConnectToStore, trained: TrainingResult) -> None:
    group = ServerGroup(connect(), server, case.plan.gradients.servers, TIMEOUT_S)
    instance = Server(spec_of(case), case.plan, group, connect, TIMEOUT_S)
    instance.limit(case.steps)
    instance.coordinator.participants.print_line = trained.printed.append
    if server == 0:
        trained.servers.append(instance)
    for server_step in instance.batches():
        loss = instance.step(server_step)
        if server == 0:
            trained.losses.append(float(loss))
            trained.rates.append(float(instance.optimizer.param_groups[0]["lr"]))
        if instance.steps == case.steps:
            break
    instance.stop()


def _work(case: Case, worker: int, connect: ConnectToStore, trained: TrainingResult) -> None:
    """Runs a worker, and runs it again if it dies and the case revives it."""
    try:
        _run_once(case, worker, connect, trained)
    except Died:
        if case.revive is not None and case.revive.wait(TIMEOUT_S):
            _run_once(case, worker, connect, trained)


def _run_once(case: Case, worker: int, connect: ConnectToStore, trained: TrainingResult) -> None:
    with _BUILDING:
        model, make_optimizer = case.make()
    session = Session(
        model,
        make_optimizer,
        loss=case.loss,
        plan=worker_plan(case.plan),
        world=ONE_RANK,
        clip_norm=None,
        seed=case.seed,
    )
    client = ServerClient(session, case.plan, worker, connect, TIMEOUT_S)

    def batches() -> Iterator[Batch]:
        for batch in session.batches(case.data, None, case.global_batch):
            case.before(worker, session.steps)
            yield batch

    def evaluate(share: SampleShare) -> Any:
        raise AssertionError("the case has no evaluation set")

    try:
        run_worker(session, client, batches, evaluate)
    except Died:
        client.close()
        raise
    trained.weights[worker] = {name: value.detach().clone() for name, value in session.module.state_dict().items()}
