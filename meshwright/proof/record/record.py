"""A rank's part: trains the steps under the plan, while `recording` writes down what is to be compared."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.launch.place import Place
from meshwright.launch.world import World
from meshwright.proof.fault import Fault
from meshwright.proof.question import Question
from meshwright.proof.record.record_served import record_served
from meshwright.proof.reference.setting import Setting, computing_in, in_dtype, set_up
from meshwright.train.output.recording import Recorder
from meshwright.train.session import Session

_LEFT_OUT = 20  # steps, after which a loss scale is a millionth of what it was


def record(question: Question, world: World, folder: Path, place: Place | None = None) -> None:
    """All ranks of the world call it; the first one writes a file for each step, and one of the start."""
    if question.plan.gradients.servers:
        record_served(question, world, folder, place or Place.nowhere())
        return
    setting = set_up(question)
    place = place or Place.nowhere()
    session = make_session(setting, question, world, place)
    plant = question.plant or Fault()
    plant.before(session)
    recorder = Recorder(session, folder)

    def look() -> None:
        recorder.computed()
        plant.on_gradients(session, session.steps + 1)
        recorder.look()

    session.on_gradients = look
    recorder.begin()
    batches = session.batches(setting.data, None, setting.global_batch, setting.loading, setting.drop_last)
    with computing_in(setting.dtype):
        for step in _steps(session, question.steps):
            place.at(step, "data")
            with computing_in(torch.float32):  # what samples draw is the same in every precision
                loaded = next(batches)
            batch = plant.on_batch(in_dtype(loaded, setting.dtype), session, step)
            recorder.batch(batch)
            loss = session.step(batch)
            plant.after_step(session, step)
            place.finish_step()
            recorder.finish(loss)
    if world.size > 1:
        dist.barrier()  # nobody leaves while another still gathers


def _steps(session: Session, wanted: int) -> Iterator[int]:
    """So many, and another one for each that the loss scale has left out, up to a limit."""
    step = 0
    while step < wanted + min(_LEFT_OUT, session.loss_scale.skipped if session.loss_scale else 0):
        step += 1
        yield step


def make_session(setting: Setting, question: Question, world: World, place: Place) -> Session:
    return Session(
        setting.model,
        setting.make_optimizer,
        loss=setting.loss,
        plan=question.ran,
        world=world,
        make_schedule=setting.make_schedule,
        schedule_per=setting.schedule_per,
        clip_norm=setting.clip_norm,
        seed=setting.seed,
        target=setting.target,
        frozen=setting.frozen,
        report=lambda doing: place.at(place.step, doing),
        sample=setting.sample(),
    )
