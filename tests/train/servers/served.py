"""Servers and workers as threads of one process: the protocol as it is, without the start of processes."""

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
from meshwright.data.loading import Share
from meshwright.launch.loopback import ADDRESS, connect_store, serve_store
from meshwright.launch.pairs import Connect
from meshwright.launch.world import World
from meshwright.plan import Plan
from meshwright.train.servers.coordinator import Lead
from meshwright.train.servers.recipe import Recipe, workers_plan
from meshwright.train.servers.server import Serving
from meshwright.train.servers.team import Team
from meshwright.train.servers.worker import Exchange, work
from meshwright.train.session import Session

TIMEOUT_S = 60.0
_MAKING = threading.Lock()  # initial weights are drawn from generators that all threads share
ALONE = World(0, 0, 1, 1, 0, torch.device("cpu"), None)


class Died(Exception):
    """A worker that raises it is gone without a word."""


@dataclass
class Case:
    """`make`: a fresh model and how its optimizer is made. `before`: called by a worker before each of its steps;
    `revive`: what the next life of one that died waits for."""

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
class Trained:
    """What came of it: the first server, the losses of the run's steps, and every worker's last weights."""

    servings: list[Serving] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def lead(self) -> Lead:
        return self.servings[0].lead


def train_in_threads(case: Case) -> Trained:
    store, port = serve_store()
    trained = Trained()

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
    assert not any(thread.is_alive() for thread in threads), "somebody still waits"
    del store  # it served until here
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


def recipe_of(case: Case) -> Recipe:
    with _MAKING:
        model, make_optimizer = case.make()
    return Recipe(model, make_optimizer, case.schedule, "step", case.clip_norm, case.seed)


def _serve(case: Case, server: int, connect: Connect, trained: Trained) -> None:
    team = Team(connect(), server, case.plan.gradients.servers, TIMEOUT_S)
    serving = Serving(recipe_of(case), case.plan, team, connect, TIMEOUT_S)
    serving.limit(case.steps)
    serving.lead.say = trained.said.append
    if server == 0:
        trained.servings.append(serving)
    for taken in serving.batches():
        loss = serving.step(taken)
        if server == 0:
            trained.losses.append(float(loss))
            trained.rates.append(float(serving.optimizer.param_groups[0]["lr"]))
        if serving.steps == case.steps:
            break
    serving.stop()


def _work(case: Case, worker: int, connect: Connect, trained: Trained) -> None:
    """One life after the other, until one of them is sent home."""
    try:
        _live(case, worker, connect, trained)
    except Died:
        if case.revive is not None and case.revive.wait(TIMEOUT_S):
            _live(case, worker, connect, trained)


def _live(case: Case, worker: int, connect: Connect, trained: Trained) -> None:
    with _MAKING:
        model, make_optimizer = case.make()
    session = Session(
        model, make_optimizer, loss=case.loss, plan=workers_plan(case.plan), world=ALONE, clip_norm=None, seed=case.seed
    )
    exchange = Exchange(session, case.plan, worker, connect, TIMEOUT_S)

    def batches() -> Iterator[Batch]:
        for batch in session.batches(case.data, None, case.global_batch):
            case.before(worker, session.steps)
            yield batch

    def evaluate(share: Share) -> Any:
        raise AssertionError("nobody asked for an evaluation")

    try:
        work(session, exchange, batches, evaluate)
    except Died:
        exchange.close()
        raise
    trained.weights[worker] = {name: value.detach().clone() for name, value in session.module.state_dict().items()}
