"""Trains and proves a ready job on generated data, for the tests of single jobs."""

import re
from pathlib import Path

import pytest
import torch

from meshwright.job import Job, load_job
from meshwright.plan import Plan
from meshwright.proof.proof import Proof
from meshwright.proof.prove import prove_in_running_ranks
from meshwright.proof.request import ProofRequest
from meshwright.train.build import build_data, build_metrics
from meshwright.train.job_session import build_session
from tests.train.one_process import world

JOBS = Path(__file__).parents[2] / "jobs"


def small_job(name: str, *settings: str) -> Job:
    return load_job(JOBS / f"{name}.yaml", ["data.synthetic=true", *settings])


def assert_loss_falls_as_the_file_says(name: str, *settings: str) -> dict[str, float]:
    """Trains 20 steps on one device, and compares with the share that the job's comment promises. Returns the metrics
    after that."""
    comment = (JOBS / f"{name}.yaml").read_text().replace("\n#", "")
    match = re.search(r"falls below (\d+)% of its first value in 20 steps", comment)
    assert match is not None
    job = small_job(name, *settings)
    train, evaluation = build_data(job)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # with several, threads of small models mostly wait for each other
    try:
        session = build_session(job, Plan(), world(), lambda activity: None)
        batches = session.batches(train, global_batch=job.train.global_batch)
        losses = [float(session.step(next(batches))) for _ in range(20)]
        evaluated = session.evaluate(evaluation, build_metrics(job), batch=64)
    finally:
        torch.set_num_threads(before)
    assert losses[-1] < int(match[1]) / 100 * losses[0]
    assert evaluated is not None
    assert set(evaluated) == {"loss", *job.metrics}
    return evaluated


def prove_in_rank(
    rank: int, size: int, name: str, plan: Plan, folder: Path, cache: Path, *settings: str
) -> Proof | None:
    """Proves a job under a plan in ranks of a test. `cache` is the cache folder with the generated data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        return prove_in_running_ranks(
            ProofRequest(small_job(name, *settings), plan, steps=2), world(rank, size), folder
        )
