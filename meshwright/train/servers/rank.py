"""One process of a run with parameter servers. The first ranks are the workers, the last ones the servers."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.data.loading import SampleShare
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.processes.environment import restart_times
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.network.own_user import admit_own_user_only
from meshwright.processes.peer_connection import describe_last_heartbeat, store_connector
from meshwright.processes.rank import run_rank
from meshwright.processes.signals import StopRequest
from meshwright.processes.world import World, world_without_group
from meshwright.train.build import build_data, build_loading, build_metrics
from meshwright.train.job_session import build_session
from meshwright.train.output.folder import RunFolder
from meshwright.train.output.recovery import record_recovery
from meshwright.train.output.step_profile import record_times
from meshwright.train.servers.server import Server
from meshwright.train.servers.server_group import ServerGroup
from meshwright.train.servers.trainer import ServerTrainer
from meshwright.train.servers.training_spec import training_spec_of, worker_plan
from meshwright.train.servers.worker import ServerClient, run_worker


def run_rank_with_servers(
    job: Job, plan: Plan, folder: RunFolder, device: str, predicted_step_s: float | None, began: float | None = None
) -> None:
    """Runs this process as a worker or as a server, depending on its rank. `predicted_step_s` is only copied into the
    result; None if there is no prediction. `began` is when this process began to run as a rank (`time.time`)."""

    def main(world: World, heartbeat: Heartbeat) -> None:
        if job.train.deterministic:
            torch.use_deterministic_algorithms(True)
        if world.rank < plan.world_size:
            train_worker(job, plan, folder, world, heartbeat)
        else:
            train_server(job, plan, folder, world, heartbeat, predicted_step_s, began)

    def join(device: str, timeout_s: float) -> World:
        world = world_without_group("cpu")  # servers compute on the CPU
        return world_without_group(device) if world.rank < plan.world_size else world

    run_rank(main, device, job.train.timeout_s, join)


def train_worker(job: Job, plan: Plan, folder: RunFolder, world: World, heartbeat: Heartbeat) -> None:
    """Runs a worker. A signal does not stop it between steps: it stops when the servers tell it to, after they have
    received its last gradients."""
    one_rank = World(0, world.local_rank, 1, 1, world.attempt, world.device, None)
    train = job.train
    with StopRequest() as stop, record_times(folder, heartbeat, world, world.rank, job.log):
        session = build_session(
            job, worker_plan(plan), one_rank, lambda activity: heartbeat.update(session.steps, activity)
        )
        train_set, eval_set = build_data(job)
        loading, metrics = build_loading(job, world.device), build_metrics(job)
        connect = store_connector(world.attempt, train.timeout_s)
        client = ServerClient(session, plan, world.rank, connect, train.timeout_s, folder=folder.logs)

        def evaluate(share: SampleShare) -> tuple[bool, dict[str, Tensor]]:
            totals, gave_up = session.evaluate_share(
                eval_set, metrics, train.global_batch, loading, lambda: stop.requested, share
            )
            return gave_up, totals.totals()

        def batches() -> Any:
            return session.batches(train_set, train.epochs, train.global_batch, loading, job.data.drop_last)

        def after_step() -> None:
            heartbeat.finish_step()
            heartbeat.update(session.steps, "data")

        run_worker(session, client, batches, evaluate, after_step)


def train_server(
    job: Job,
    plan: Plan,
    folder: RunFolder,
    world: World,
    heartbeat: Heartbeat,
    predicted_step_s: float | None,
    began: float | None = None,
) -> None:
    """Runs the trainer on a server. The servers have a process group without the workers. `began` is when this process
    began to run as a rank; None if that is not known."""
    gradients, timeout_s = plan.gradients, job.train.timeout_s
    server_rank = world.rank - plan.world_size
    connect = store_connector(world.attempt, timeout_s)
    store = connect()
    if gradients.servers > 1:
        admit_own_user_only()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("servers", store),
            rank=server_rank,
            world_size=gradients.servers,
            timeout=timedelta(seconds=timeout_s),
        )
    servers = gradients.servers
    server_world = World(server_rank, world.local_rank, servers, servers, world.attempt, world.device, store)
    restart = restart_times() if server_rank == 0 else None
    with (
        StopRequest() as stop,
        record_times(folder, heartbeat, server_world, world.rank, job.log),
        record_recovery(restart, began, server_world, folder, heartbeat, lambda line: trainer.display.line(line)),
    ):
        group = ServerGroup(store, server_rank, servers, timeout_s)
        server = Server(training_spec_of(job), plan, group, connect, timeout_s)
        server.coordinator.participants.last_seen = lambda worker: describe_last_heartbeat(folder.logs, worker)
        trainer = ServerTrainer(job, server, server_world, folder, heartbeat, predicted_step_s=predicted_step_s)
        trainer.run(stop)
        server.stop()
