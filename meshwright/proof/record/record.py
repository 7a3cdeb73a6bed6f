"""What each rank of a proof does: it trains the steps under the plan, while a `StepRecorder` writes the values that
will be compared."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.messages.exchange import broadcast_value
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.world import World
from meshwright.proof.record.operators import OperatorRecorder, write_calls
from meshwright.proof.record.record_with_servers import record_with_servers
from meshwright.proof.reference.lift_casts import LiftCasts
from meshwright.proof.reference.rank_shares import moving_shares
from meshwright.proof.reference.reference_setup import ReferenceSetup, batch_in_dtype, build_setup, default_dtype
from meshwright.proof.request import ProofRequest
from meshwright.train.output.recording import StepRecorder
from meshwright.train.session import Session

_MOST_SKIPPED_STEPS = 20  # so many halvings make the loss scale a millionth of its first value


def record(request: ProofRequest, world: World, folder: Path, heartbeat: Heartbeat | None = None) -> None:
    """Trains and records the steps. All ranks of the world call this function. Rank 0 writes one file for the initial
    state and one for each step."""
    heartbeat = heartbeat or Heartbeat.in_memory()
    if request.plan.gradients.servers:
        record_with_servers(request, world, folder, heartbeat)
        return
    setup = build_setup(request)
    session = make_session(setup, request, world, heartbeat)
    if session.shares is not None:
        session.shares.repeat(moving_shares(session.plan, setup.global_batch))
    if request.prepare_session:
        request.prepare_session(session)
    recorder = StepRecorder(session, folder)

    def record_gradients() -> None:
        recorder.note_backward()
        recorder.note_gradients()

    session.on_gradients = record_gradients
    recorder.write_start()
    operators = OperatorRecorder(session.module)
    batches = session.batches(setup.data, None, setup.global_batch, setup.loading, setup.drop_last)
    with default_dtype(setup.dtype):
        for step in _steps(session, request.steps):
            heartbeat.update(step, "data")
            with default_dtype(torch.float32):  # samples then draw the same random numbers in every precision
                loaded_batch = next(batches)
            batch = batch_in_dtype(loaded_batch, setup.dtype)
            recorder.note_batch(batch)
            recorded = operators if step == request.operators_of_step else nullcontext()
            with LiftCasts() if request.lifts_casts else nullcontext(), recorded:
                loss = session.step(batch)
            heartbeat.finish_step()
            recorder.write_step(loss)
    if request.operators_of_step is not None:
        shared = Path(broadcast_value(str(folder)))
        if shared.is_dir():  # not on another machine
            write_calls(operators, shared / f"operators.{world.rank}.pt")
    if world.size > 1:
        dist.barrier()  # no rank may exit while another still gathers


def _steps(session: Session, count: int) -> Iterator[int]:
    """Yields step numbers from 1: `count` of them, and one more for each step that the loss scale has skipped, up to
    `_MOST_SKIPPED_STEPS` more."""
    step = 0
    while step < count + min(_MOST_SKIPPED_STEPS, session.loss_scale.skipped if session.loss_scale else 0):
        step += 1
        yield step


def make_session(setup: ReferenceSetup, request: ProofRequest, world: World, heartbeat: Heartbeat) -> Session:
    """Returns the session in which this rank trains the request's model under its plan."""
    return Session(
        setup.model,
        setup.make_optimizer,
        loss=setup.loss,
        plan=request.executed_plan,
        world=world,
        make_schedule=setup.make_schedule,
        schedule_per=setup.schedule_per,
        clip_norm=setup.clip_norm,
        seed=setup.seed,
        target=setup.target,
        frozen=setup.frozen,
        report=lambda activity: heartbeat.update(heartbeat.step, activity),
        sample=setup.sample(),
    )
