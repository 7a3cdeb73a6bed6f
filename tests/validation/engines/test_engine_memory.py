"""The memory that the programs of published measurements need."""

import pytest

import meshwright as mw
from meshwright.cluster.names import cluster_from_name
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.simulator.memory.peak import predict_memory
from meshwright.simulator.predict import device_memory, plan_memory, predict_plan
from tests.profile.models import scores_loss
from tests.simulator.test_predict import gpt2
from tests.soaked import all_but
from validation.engines.engine import engine_named


@pytest.mark.parametrize(
    ("name", "as_eager"),
    all_but([("pytorch", True), ("deepspeed", False)], [("pytorch", True), ("deepspeed", False), ("megatron", False)]),
)
def test_only_an_eager_engine_needs_the_memory_of_eager_pytorch(name: str, as_eager: bool) -> None:
    model, batch = gpt2()
    traced = trace_profile(model, batch, scores_loss, precision="bf16")
    adamw = OptimizerCost(state_ratio=2.0, temporary_ratio=0.0, multi_tensor=True)
    cluster = cluster_from_name("8xA100-80GB")
    plan = mw.Plan.model_validate({"axes": {"replicate": 8}, "numerics": {"precision": "bf16"}})
    engine = engine_named(name)
    prediction = predict_plan(cluster, traced, plan, 60, adamw, runtime=engine)
    assert prediction.batch_per_rank == 8
    eager = predict_memory(traced, plan, 8, adamw, device_memory(cluster))
    assert (prediction.memory == eager) == as_eager
    assert prediction.memory == plan_memory(cluster, traced, plan, 60, adamw, engine)
    assert prediction.memory_bytes == prediction.memory.allocated_bytes
