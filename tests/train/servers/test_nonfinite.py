"""NaN in the data of one worker: servers leave out its update, or end the run, as the job says."""

import json
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.checkpoint.load import find_newest_valid
from meshwright.errors import InputError, TrainingDiverged
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.loopback import ADDRESS, connect_store, serve_store
from meshwright.processes.peer_connection import ConnectToStore
from meshwright.processes.signals import StopRequest
from meshwright.train.build import build_data, build_loading
from meshwright.train.job_session import build_session
from meshwright.train.output.folder import RunFolder, read_result
from meshwright.train.servers.server import Server
from meshwright.train.servers.server_group import ServerGroup
from meshwright.train.servers.trainer import ServerTrainer
from meshwright.train.servers.training_spec import training_spec_of, worker_plan
from meshwright.train.servers.worker import ServerClient, run_worker
from meshwright.train.step.nonfinite import nonfinite_keys
from tests.train.one_process import toy_job
from tests.train.one_process import train as train_in_one_process
from tests.train.runs.test_nonfinite import BAD_STEPS, PROBLEMS, STEPS
from tests.train.servers.in_threads import ONE_RANK, TIMEOUT_S
from tests.train.servers.server_cases import server_plan
from tests.train.servers.test_checkpoints import make_server

pytestmark = pytest.mark.usefixtures("loopback")
WORKERS = 2


def work(job: Job, plan: Plan, worker: int, connect: ConnectToStore) -> None:
    session = build_session(job, worker_plan(plan), ONE_RANK, lambda activity: None)
    client = ServerClient(session, plan, worker, connect, TIMEOUT_S)
    data, train = build_data(job)[0], job.train
    loading = build_loading(job, ONE_RANK.device)

    def evaluate(share: Any) -> Any:
        raise AssertionError("the job has no evaluation set")

    run_worker(session, client, lambda: session.batches(data, train.epochs, train.global_batch, loading), evaluate)


def serve(job: Job, updates: str, folder: Path) -> ServerTrainer:
    """Trains the job with one server, in this thread, and two workers. Raises what the server raises."""
    plan = server_plan(WORKERS, 1, gradients={"updates": updates})
    store, port = serve_store()

    def connect() -> dist.Store:
        return connect_store(ADDRESS, port, timedelta(seconds=TIMEOUT_S))

    server = Server(training_spec_of(job), plan, ServerGroup(connect(), 0, 1, TIMEOUT_S), connect, TIMEOUT_S)
    RunFolder(folder).job.touch()
    trainer = ServerTrainer(job, server, ONE_RANK, RunFolder(folder), Heartbeat.in_memory())
    threads = [threading.Thread(target=work, args=(job, plan, w, connect), daemon=True) for w in range(WORKERS)]
    for thread in threads:
        thread.start()
    try:
        trainer.run(StopRequest())
    finally:
        server.stop()
        for thread in threads:
            thread.join(TIMEOUT_S)
        del store
    return trainer


@pytest.mark.parametrize("problem", ["nan", "gradient"])
def test_servers_leave_out_a_synchronous_step(tmp_path: Path, problem: str) -> None:
    job = toy_job(**PROBLEMS[problem], train={"on_nonfinite": "skip"})
    trainer = serve(job, "synchronous", tmp_path)
    assert (trainer.session.steps, trainer.session.skipped_steps) == (STEPS, 2)
    assert trainer.server.coordinator.version == STEPS - 2
    assert nonfinite_keys(trainer.session.state()) == []
    result, newest = read_result(trainer.folder), find_newest_valid(trainer.folder.checkpoints)
    assert result is not None
    assert newest.manifest is not None
    assert result["skipped_steps"] == newest.manifest.about["skipped"] == 2
    log = [json.loads(line) for line in trainer.folder.metrics.read_text().splitlines()]
    assert [line["step"] for line in log if line["kind"] == "skipped"] == BAD_STEPS


def test_servers_leave_out_the_update_of_one_worker(tmp_path: Path) -> None:
    job = toy_job(**PROBLEMS["nan"], train={"on_nonfinite": "skip"})
    trainer = serve(job, "asynchronous", tmp_path)
    assert (trainer.session.steps, trainer.session.skipped_steps) == (STEPS, 2)
    assert trainer.server.coordinator.version == WORKERS * STEPS - 2
    assert nonfinite_keys(trainer.session.state()) == []


@pytest.mark.parametrize("updates", ["synchronous", "asynchronous"])
def test_a_run_with_servers_stops(tmp_path: Path, updates: str) -> None:
    with pytest.raises(TrainingDiverged, match=r"the loss is nan since step \d, for 3 steps in a row"):
        serve(toy_job(**PROBLEMS["nan"]), updates, tmp_path)
    assert read_result(RunFolder(tmp_path)) is None
    assert find_newest_valid(RunFolder(tmp_path).checkpoints).path is None


def test_servers_do_not_resume_a_run_that_leaves_out_batches(tmp_path: Path) -> None:
    job = toy_job(**PROBLEMS["nan"], train={"on_nonfinite": "rewind"})
    alone = train_in_one_process(job, tmp_path, stop_after=STEPS - 1)
    newest = find_newest_valid(alone.folder.checkpoints)
    assert newest.path is not None
    assert newest.manifest is not None
    server = make_server(0, 1)
    with pytest.raises(InputError, match=r"the run leaves out 2 batches .* set gradients.servers to 0"):
        server.restore(newest.path, newest.manifest)
