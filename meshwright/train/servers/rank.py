"""One process of a run with parameter servers: the first ranks are its workers, those behind them its servers."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.data.loading import Share
from meshwright.job import Job
from meshwright.launch.pairs import last_seen, own_connection
from meshwright.launch.place import Place
from meshwright.launch.rank import run_rank
from meshwright.launch.signals import StopRequest
from meshwright.launch.world import World, stand_apart
from meshwright.plan import Plan
from meshwright.train.build import build_data, build_loading, build_metrics
from meshwright.train.job_session import build_session
from meshwright.train.output.folder import RunFolder
from meshwright.train.servers.recipe import of_job, workers_plan
from meshwright.train.servers.server import Serving
from meshwright.train.servers.team import Team
from meshwright.train.servers.trainer import Conduct
from meshwright.train.servers.worker import Exchange, work


def run_served(job: Job, plan: Plan, folder: RunFolder, device: str) -> None:
    def main(world: World, place: Place) -> None:
        if job.train.deterministic:
            torch.use_deterministic_algorithms(True)
        if world.rank < plan.world_size:
            train_worker(job, plan, folder, world, place)
        else:
            train_server(job, plan, folder, world, place)

    def join(device: str, timeout_s: float) -> World:
        here = stand_apart("cpu")
        return stand_apart(device) if here.rank < plan.world_size else here

    run_rank(main, device, job.train.timeout_s, join)


def train_worker(job: Job, plan: Plan, folder: RunFolder, world: World, place: Place) -> None:
    """Does what servers say. It is asked to stop by them, not by a signal: what it has computed is not lost."""
    alone = World(0, world.local_rank, 1, 1, world.attempt, world.device, None)
    train = job.train
    with StopRequest() as stop:
        session = build_session(job, workers_plan(plan), alone, lambda doing: place.at(session.steps, doing))
        data, evaluation_set = build_data(job)
        loading, metrics = build_loading(job, world.device), build_metrics(job)
        connect = own_connection(world.attempt, train.timeout_s)
        exchange = Exchange(session, plan, world.rank, connect, train.timeout_s, folder=folder.logs)

        def evaluate(share: Share) -> tuple[bool, dict[str, Tensor]]:
            tally, gave_up = session.tallied(
                evaluation_set, metrics, train.global_batch, loading, lambda: stop.requested, share
            )
            return gave_up, tally.totals()

        def batches() -> Any:
            return session.batches(data, train.epochs, train.global_batch, loading, job.data.drop_last)

        def finished() -> None:
            place.finish_step()
            place.at(session.steps, "data")

        work(session, exchange, batches, evaluate, finished)


def train_server(job: Job, plan: Plan, folder: RunFolder, world: World, place: Place) -> None:
    """Runs the trainer on what workers do; the servers are a world of their own."""
    gradients, timeout_s = plan.gradients, job.train.timeout_s
    server = world.rank - plan.world_size
    connect = own_connection(world.attempt, timeout_s)
    store = connect()
    if gradients.servers > 1:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("servers", store),
            rank=server,
            world_size=gradients.servers,
            timeout=timedelta(seconds=timeout_s),
        )
    among = World(server, world.local_rank, gradients.servers, gradients.servers, world.attempt, world.device, store)
    with StopRequest() as stop:
        team = Team(store, server, gradients.servers, timeout_s)
        serving = Serving(of_job(job), plan, team, connect, timeout_s)
        serving.lead.seen = lambda worker: last_seen(folder.logs, worker)
        conduct = Conduct(job, serving, among, folder, place)
        conduct.run(stop)
        serving.stop()
