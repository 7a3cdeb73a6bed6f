"""`record` for plans with parameter servers: the first worker records its steps, with the gradients that the servers
have combined."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from meshwright.data.batch import Batch
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.peer_connection import store_connector
from meshwright.processes.world import World
from meshwright.proof.reference.lift_casts import LiftCasts
from meshwright.proof.reference.reference_setup import ReferenceSetup, batch_in_dtype, build_setup, default_dtype
from meshwright.proof.request import ProofRequest
from meshwright.train.output.recording import StepRecorder
from meshwright.train.servers.messages import Instruction
from meshwright.train.servers.server import Server
from meshwright.train.servers.server_group import ServerGroup
from meshwright.train.servers.training_spec import TrainingSpec, worker_plan
from meshwright.train.servers.worker import ServerClient
from meshwright.train.session import Session


def record_with_servers(request: ProofRequest, world: World, folder: Path, heartbeat: Heartbeat) -> None:
    """Runs this rank as a worker, or as a server: the first `plan.world_size` ranks are workers, the ranks after them
    are servers."""
    setup = build_setup(request)
    with default_dtype(setup.dtype):
        if world.rank < request.plan.world_size:
            _run_worker(request, setup, world, folder, heartbeat)
        else:
            _run_server(request, setup, world, heartbeat)


def _run_server(request: ProofRequest, setup: ReferenceSetup, world: World, heartbeat: Heartbeat) -> None:
    plan = request.executed_plan
    assert world.store is not None
    spec = TrainingSpec(
        setup.model,
        setup.make_optimizer,
        setup.make_schedule,
        setup.schedule_per,
        setup.clip_norm,
        setup.seed,
    )
    group = ServerGroup(world.store, world.rank - plan.world_size, plan.gradients.servers, request.timeout_s)
    connect = store_connector(world.attempt, request.timeout_s)
    server = Server(spec, plan, group, connect, request.timeout_s, recorded=True)
    server.limit(request.steps)
    for batch in server.batches():
        heartbeat.update(server.steps, "waiting for workers")
        server.step(batch)
        heartbeat.finish_step()
    server.stop()


def _run_worker(request: ProofRequest, setup: ReferenceSetup, world: World, folder: Path, heartbeat: Heartbeat) -> None:
    """Trains in a session of one rank, which sends its gradients to the servers. The first worker records the steps."""
    plan = request.executed_plan
    session = Session(
        setup.model,
        setup.make_optimizer,
        loss=setup.loss,
        plan=worker_plan(plan),
        world=replace(world, rank=world.rank, size=1, local_size=1),
        seed=setup.seed,
        target=setup.target,
        frozen=setup.frozen,
        report=lambda activity: heartbeat.update(heartbeat.step, activity),
    )
    connect = store_connector(world.attempt, request.timeout_s)
    client = ServerClient(session, plan, world.rank, connect, request.timeout_s, recorded=True)
    if request.prepare_session:
        request.prepare_session(session)
    client.receive_start()
    recorder = StepRecorder(session, folder) if world.rank == 0 else None
    if recorder:
        recorder.write_start()
        session.on_gradients = partial(_record_gradients, recorder)
    for step, batch in enumerate(_batches(session, setup), 1):
        if client.reply.instruction != Instruction.STEP:
            break
        heartbeat.update(step, "data")
        client.batch = batch
        if recorder:
            recorder.note_batch(client.batch)
        with LiftCasts() if request.lifts_casts else nullcontext():
            loss = session.step(client.batch)
        if setup.clip_norm is None:
            session.gradient_norm = None
        heartbeat.finish_step()
        if recorder:
            recorder.write_step(loss)


def _batches(session: Session, setup: ReferenceSetup) -> Iterator[Batch]:
    batches = session.batches(setup.data, None, setup.global_batch, setup.loading, setup.drop_last)
    return (batch_in_dtype(batch, setup.dtype) for batch in batches)


def _record_gradients(recorder: StepRecorder) -> None:
    recorder.note_backward()
    recorder.note_gradients()
