"""`record` under parameter servers: the first worker writes down what it and the servers make of each step."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.data.batch import Batch
from meshwright.launch.pairs import own_connection
from meshwright.launch.place import Place
from meshwright.launch.world import World
from meshwright.proof.fault import Fault
from meshwright.proof.question import Question
from meshwright.proof.reference.setting import Setting, computing_in, in_dtype, set_up
from meshwright.train.output.recording import Recorder
from meshwright.train.servers.messages import Do
from meshwright.train.servers.recipe import Recipe, workers_plan
from meshwright.train.servers.server import Serving
from meshwright.train.servers.team import Team
from meshwright.train.servers.worker import Exchange
from meshwright.train.session import Session


def record_served(question: Question, world: World, folder: Path, place: Place) -> None:
    setting = set_up(question)
    with computing_in(setting.dtype):
        if world.rank < question.plan.world_size:
            _work(question, setting, world, folder, place)
        else:
            _serve(question, setting, world, place)


def _serve(question: Question, setting: Setting, world: World, place: Place) -> None:
    plan = question.ran
    assert world.store is not None
    recipe = Recipe(
        setting.model,
        setting.make_optimizer,
        setting.make_schedule,
        setting.schedule_per,
        setting.clip_norm,
        setting.seed,
    )
    team = Team(world.store, world.rank - plan.world_size, plan.gradients.servers, question.timeout_s)
    connect = own_connection(world.attempt, question.timeout_s)
    serving = Serving(recipe, plan, team, connect, question.timeout_s, recorded=True)
    serving.limit(question.steps)
    for taken in serving.batches():
        place.at(serving.steps, "waiting for workers")
        serving.step(taken)
        place.finish_step()
    serving.stop()


def _work(question: Question, setting: Setting, world: World, folder: Path, place: Place) -> None:
    """A worker's session is a world of its own. What servers do with wrong gradients is for the proof to find: a fault
    spoils them before they are pushed."""
    plan = question.ran
    session = Session(
        setting.model,
        setting.make_optimizer,
        loss=setting.loss,
        plan=workers_plan(plan),
        world=replace(world, rank=world.rank, size=1, local_size=1),
        seed=setting.seed,
        target=setting.target,
        frozen=setting.frozen,
        report=lambda doing: place.at(place.step, doing),
    )
    connect = own_connection(world.attempt, question.timeout_s)
    exchange = Exchange(session, plan, world.rank, connect, question.timeout_s, recorded=True)
    plant = question.plant or Fault()
    exchange.before_push = lambda: plant.on_gradients(session, session.steps + 1)
    plant.before(session)
    exchange.welcome()
    recorder = Recorder(session, folder) if world.rank == 0 else None
    if recorder:
        recorder.begin()
        session.on_gradients = lambda: _looked(recorder)
    for step, batch in enumerate(_batches(session, setting), 1):
        if exchange.reply.do != Do.STEP:
            break
        place.at(step, "data")
        exchange.batch = plant.on_batch(batch, session, step)
        if recorder:
            recorder.batch(exchange.batch)
        loss = session.step(exchange.batch)
        if setting.clip_norm is None:
            session.gradient_norm = None
        plant.after_step(session, step)
        place.finish_step()
        if recorder:
            recorder.finish(loss)


def _batches(session: Session, setting: Setting) -> Iterator[Batch]:
    found = session.batches(setting.data, None, setting.global_batch, setting.loading, setting.drop_last)
    return (in_dtype(batch, setting.dtype) for batch in found)


def _looked(recorder: Any) -> None:
    recorder.computed()
    recorder.look()
