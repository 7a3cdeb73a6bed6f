"""One rank of a run: `python -m meshwright.train.rank RUN_FOLDER DEVICE STEPS_TO_RECORD`, started by `run`."""

import sys
from pathlib import Path

import torch

from meshwright.errors import InputError
from meshwright.job import Job, load_job, load_plan
from meshwright.launch.place import Place
from meshwright.launch.rank import run_rank
from meshwright.launch.signals import StopRequest
from meshwright.launch.world import World
from meshwright.plan import Plan
from meshwright.train.job_session import build_session
from meshwright.train.output.folder import RunFolder
from meshwright.train.servers.rank import run_served
from meshwright.train.trainer import Trainer


def train_rank(job: Job, plan: Plan, folder: RunFolder, world: World, place: Place, record: int = 0) -> bool:
    """Trains as this rank of the world; True when the run is finished."""
    if plan.gradients.servers:
        raise InputError(
            f"the plan ({plan.summary()}) has parameter servers, which `meshwright train` starts itself: run it without"
            " torchrun, mpirun or srun"
        )
    if job.train.deterministic:
        torch.use_deterministic_algorithms(True)
    with StopRequest() as stop:
        session = build_session(job, plan, world, lambda doing: place.at(session.steps, doing))
        return Trainer(job, session, world, folder, place, record).run(stop)


def main() -> None:
    folder, device, record = RunFolder(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    job, plan = load_job(folder.job), load_plan(folder.plan)
    if plan.gradients.servers:
        run_served(job, plan, folder, device)
        return
    run_rank(lambda world, place: _train(job, plan, folder, world, place, record), device, job.train.timeout_s)


def _train(job: Job, plan: Plan, folder: RunFolder, world: World, place: Place, record: int) -> None:
    train_rank(job, plan, folder, world, place, record)


if __name__ == "__main__":
    main()
