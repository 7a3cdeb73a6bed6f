"""A run folder with two recorded steps and a checkpoint, trained in this process."""

from pathlib import Path

from meshwright.plan import Plan
from meshwright.train.build import build_data, build_loading
from meshwright.train.job_session import build_session
from meshwright.train.output.folder import RunFolder
from meshwright.train.output.recording import record_steps
from tests.export.runs import train_run
from tests.train.one_process import toy_job, world

STEPS = 2


def recorded_run(folder: Path) -> Path:
    """Trains a job of two steps in the folder, as `train --record 2` does, and returns the folder."""
    job = toy_job(data={"train": {"call": "tests.train.toy:points", "size": 20}}, train={"epochs": 1}, optimizer=ADAMW)
    train_run(job, folder)
    session = build_session(job, Plan(), world(), lambda activity: None)
    batches = session.batches(build_data(job)[0], 1, job.train.global_batch, build_loading(job, world().device))
    with record_steps(session, RunFolder(folder).record, STEPS) as step:
        for batch in batches:
            step(batch)
    return folder


ADAMW = {"call": "torch.optim:AdamW", "lr": 0.01}
