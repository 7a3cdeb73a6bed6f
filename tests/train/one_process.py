"""Trains the toy job in this process, as the only rank: this is quick, and tests can look at everything."""

from pathlib import Path
from typing import Any

import torch

from meshwright.job import Job, parse_job
from meshwright.plan import Plan
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.signals import StopRequest
from meshwright.processes.world import World
from meshwright.train.job_session import build_session
from meshwright.train.output.folder import RunFolder
from meshwright.train.session import Session
from meshwright.train.trainer import Trainer

SIZE, BATCH = 50, 10

TOY: dict[str, Any] = {
    "name": "toy",
    "model": {"call": "tests.train.toy:Net", "hidden": 8},
    "data": {"train": {"call": "tests.train.toy:points", "size": SIZE}},
    "loss": {"call": "torch.nn.functional:cross_entropy"},
    "optimizer": {"call": "torch.optim:AdamW", "lr": 0.01},
    "train": {"epochs": 2, "global_batch": BATCH, "seed": 3},
    "checkpoint": {"every_steps": None},
    "log": {"every_steps": 1, "tensorboard": False},
}
EVALUATED: dict[str, Any] = {
    "data": {**TOY["data"], "eval": {"call": "tests.train.toy:points", "size": 23}},
    "metrics": {"accuracy": {"call": "meshwright.train.metrics:accuracy"}},
}


def toy_job(**sections: Any) -> Job:
    """The toy job with some fields of some sections changed. A section with a `call` replaces the whole section."""
    raw = dict(TOY)
    for name, section in sections.items():
        old = raw.get(name)
        merges = isinstance(old, dict) and isinstance(section, dict) and "call" not in section
        raw[name] = {**raw[name], **section} if merges else section
    return parse_job(raw)


def world(rank: int = 0, size: int = 1) -> World:
    return World(rank, rank, size, size, 0, torch.device("cpu"), None)


class StopAfter(StopRequest):
    """A stop request that arrives as soon as so many steps are done."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.trainer: Trainer | None = None

    @property
    def requested(self) -> bool:
        assert self.trainer is not None
        return self.trainer.session.steps >= self.steps


def make_trainer(job: Job, folder: Path, rank: int = 0, size: int = 1) -> Trainer:
    folder.mkdir(parents=True, exist_ok=True)
    RunFolder(folder).job.touch()  # a run whose job.yaml is gone ends: its folder is being deleted
    plan = Plan.model_validate({"axes": {"replicate": size}}) if job.plan == "auto" else job.plan
    session = build_session(job, plan, world(rank, size), lambda activity: None)
    return Trainer(job, session, world(rank, size), RunFolder(folder), Heartbeat.in_memory())


def train(job: Job, folder: Path, stop_after: int | None = None, rank: int = 0, size: int = 1) -> Trainer:
    """Runs the job to its end, or to a stop after `stop_after` steps."""
    trainer = make_trainer(job, folder, rank, size)
    stop = StopRequest()
    if stop_after is not None:
        stop = StopAfter(stop_after)
        stop.trainer = trainer
    finished = trainer.run(stop)
    assert finished == (stop_after is None)
    return trainer


def session_of(trainer: Trainer) -> Session:
    assert isinstance(trainer.session, Session)
    return trainer.session


def equal_states(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
