"""One rank of a run that run.py starts. The launcher calls `main` with the arguments RUN_FOLDER, DEVICE,
STEPS_TO_RECORD and PREDICTED_STEP_S (empty without a prediction) in `sys.argv`."""

import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from meshwright.job import Job, load_job, load_plan
from meshwright.parallel.exchange_names import ModelExchanges
from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules
from meshwright.processes.environment import restart_times
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.output import terminal
from meshwright.processes.rank import run_rank
from meshwright.processes.signals import StopRequest
from meshwright.processes.world import World
from meshwright.progress import phase, showing
from meshwright.train.job_session import build_session
from meshwright.train.output.folder import RunFolder
from meshwright.train.output.peak_memory import memory_by_kind
from meshwright.train.output.recovery import record_recovery
from meshwright.train.output.step_profile import record_times
from meshwright.train.servers.rank import run_rank_with_servers
from meshwright.train.trainer import Trainer


def train_rank(
    job: Job,
    plan: Plan,
    folder: RunFolder,
    world: World,
    heartbeat: Heartbeat,
    recorded_steps: int = 0,
    predicted_step_s: float | None = None,
    began: float | None = None,
) -> bool:
    """Trains as this rank of the world. Returns True if the run is finished, and False if it was stopped before its
    end. `began` is when this process began to run as a rank (`time.time`); None if that is not known."""
    check_rules(plan, "launched ranks")
    if job.train.deterministic:
        torch.use_deterministic_algorithms(True)
    restart = restart_times() if world.rank == 0 else None
    with (
        StopRequest() as stop,
        record_times(folder, heartbeat, world, world.rank, job.log),
        record_recovery(restart, began, world, folder, heartbeat, lambda line: trainer.display.line(line)),
    ):
        with showing(terminal()) if world.rank == 0 else nullcontext(), phase("building the model and dividing it"):
            session = build_session(job, plan, world, lambda activity: heartbeat.update(session.steps, activity))
            session.compare_weight_copies()
        heartbeat.exchanges = ModelExchanges(session.parallel)
        heartbeat.memory = partial(memory_by_kind, session.module, session.optimizer, world.device)
        trainer = Trainer(job, session, world, folder, heartbeat, recorded_steps, predicted_step_s)
        return trainer.run(stop)


def main() -> None:
    began = time.time()
    folder, device, recorded_steps = RunFolder(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    predicted_step_s = float(sys.argv[4]) if sys.argv[4] else None
    job, plan = load_job(folder.job), load_plan(folder.plan)
    if plan.gradients.servers:
        run_rank_with_servers(job, plan, folder, device, predicted_step_s, began)
        return

    def train(world: World, heartbeat: Heartbeat) -> None:
        train_rank(job, plan, folder, world, heartbeat, recorded_steps, predicted_step_s, began)

    run_rank(train, device, job.train.timeout_s)


if __name__ == "__main__":
    main()
