"""A rank's part: trains the steps under the plan, while `recording` writes down what is to be compared."""

from pathlib import Path

import torch.distributed as dist

from meshwright.launch.place import Place
from meshwright.launch.world import World
from meshwright.plan import Plan
from meshwright.proof.fault import Fault
from meshwright.proof.question import Question
from meshwright.proof.setting import Setting, computing_in, in_dtype, set_up
from meshwright.train.recording import Recorder
from meshwright.train.session import Session


def record(question: Question, world: World, folder: Path, place: Place | None = None) -> None:
    """All ranks of the world call it; the first one writes a file for each step, and one of the start."""
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
        for step in range(1, question.steps + 1):
            place.at(step, "data")
            batch = plant.on_batch(in_dtype(next(batches), setting.dtype), session, step)
            recorder.batch(batch)
            loss = session.step(batch)
            plant.after_step(session, step)
            place.finish_step()
            recorder.finish(loss)
    if world.size > 1:
        dist.barrier()  # nobody leaves while another still gathers


def make_session(setting: Setting, question: Question, world: World, place: Place) -> Session:
    return Session(
        setting.model,
        setting.make_optimizer,
        loss=setting.loss,
        plan=_in_full_precision(question.plan),
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


def _in_full_precision(plan: Plan) -> Plan:
    """The model runs in the types it has, which are those of the comparison."""
    numerics = plan.numerics.model_copy(update={"precision": "fp32", "cast": "operators"})
    gradients = plan.gradients.model_copy(update={"precision": "fp32"})
    return plan.model_copy(update={"numerics": numerics, "gradients": gradients})
