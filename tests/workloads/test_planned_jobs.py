"""Ready jobs are planned: for 16 GPUs at full size, with models on the meta device and generated data; and for two CPU
ranks, where the first plans of the search, which `plan: auto` may take, make a step."""

import math

import pytest
import torch

from meshwright.auto.choose import best_plan
from meshwright.auto.inputs import planning_inputs
from meshwright.job import Job, load_job
from meshwright.plan import Plan
from meshwright.planner.offload import search_with_offload
from meshwright.train.build import build_data
from meshwright.train.job_parts import JobParts
from meshwright.train.job_session import build_session
from meshwright.train.step.optimizer import build_optimizer
from meshwright.user.call import bind
from tests.auto.machines import cpu_cluster
from tests.ranks import ranks
from tests.soaked import all_but
from tests.train.one_process import world
from tests.workloads.job_proofs import JOBS, small_job

COUNT = 6
_SMALL = ("train.global_batch=8", "data.workers=0")


@pytest.mark.parametrize("name", all_but([], ["physics", "unet", "recommender"]))
def test_a_job_is_planned_for_16_gpus(name: str) -> None:
    job = load_job(JOBS / f"{name}.yaml")
    parts = JobParts(job.model_copy(update={"data": job.data.model_copy(update={"synthetic": True})}))
    assert job.loss is not None
    plan = best_plan(
        parts.model,
        parts.sample,
        global_batch=job.train.global_batch,
        loss=bind(job.loss, "loss"),
        optimizer=build_optimizer(job.optimizer, parts.model),
        cluster="2x8xA100-80GB",
    )
    assert plan.world_size == 16
    if name == "physics":
        assert plan.axes.pipeline == 1  # it takes derivatives through the whole model


def first_plans(job: Job) -> list[Plan]:
    inputs, profiles = planning_inputs(JobParts(job), cpu_cluster(2), top=COUNT, allow="rounding")
    return [priced.plan for priced in search_with_offload(inputs, profiles).ranked[:COUNT]]


def losses_of_a_step(rank: int, size: int, job: Job, plans: list[Plan]) -> list[float]:
    losses = []
    for plan in plans:
        torch.manual_seed(0)
        session = build_session(job, plan, world(rank, size), lambda activity: None)
        batches = session.batches(build_data(job)[0], None, job.train.global_batch)
        losses.append(float(session.step(next(batches))))
    return losses


@pytest.mark.parametrize("name", all_but(["gpt"], sorted(file.stem for file in JOBS.glob("*.yaml"))))
def test_the_first_plans_of_a_job_make_a_step(name: str) -> None:
    job = small_job(name, *_SMALL)
    plans = first_plans(job)
    with ranks(2, timeout_s=600) as two:
        per_rank = two.run(losses_of_a_step, job, plans)
    for plan, losses in zip(plans, zip(*per_rank, strict=True), strict=True):
        assert all(map(math.isfinite, losses)), plan.summary()
