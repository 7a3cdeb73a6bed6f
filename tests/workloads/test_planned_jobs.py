"""The newer jobs are planned for 16 GPUs at full size, with models on the meta device and generated data."""

import pytest

from meshwright.auto.choose import best_plan
from meshwright.call import bind
from meshwright.job import load_job
from meshwright.train.job_parts import JobParts
from meshwright.train.step.optimizer import build_optimizer
from tests.soaked import all_but
from tests.workloads.job_proofs import JOBS


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
