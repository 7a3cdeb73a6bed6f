"""A plan takes no longer on a cluster that computes or sends faster, if it has neither a pipeline nor both replicas and
shards (docs/questions.md says what is missing there)."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cluster.names import cluster_from_name
from meshwright.plan import Plan
from meshwright.planner.questions.variations import changed
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.predict import predict_plan
from meshwright.simulator.runtime import Runtime
from meshwright.simulator.step import StepTime, predict_step
from meshwright.workloads.text.decoder import Decoder
from tests.profile.models import scores_loss

ADAMW = OptimizerCost(state_ratio=2.0, temporary_ratio=0.0, multi_tensor=True)
AXES = [
    {"replicate": 8},
    {"shard": 8},
    {"replicate": 4, "tensor": 2},
    {"shard": 4, "tensor": 2},
    {"tensor": 4, "replicate": 2},
]


@cache
def decoder() -> ModelProfile:
    """A model with little to compute for its weights, so that launches and exchanges take longest."""
    with torch.device("meta"):
        tokens = torch.empty(2, 16, dtype=torch.long)
        model = Decoder(layers=4, hidden=1024, heads=4, sequence=16, vocabulary=500, tied=False)
    return trace_profile(model, (tokens, tokens), scores_loss, precision="bf16", with_structure=True)


@settings(max_examples=60, deadline=None)
@given(
    axes=st.sampled_from(AXES),
    sharding=st.sampled_from(["optimizer", "gradients", "parameters"]),
    accumulation=st.sampled_from([1, 2, 4]),
    batch=st.sampled_from([32, 256, 4096]),
    cluster=st.sampled_from(["2x4xA100-80GB", "4x2xV100", "2x4xH100@100G"]),
    change=st.sampled_from(["compute", "link", "within"]),
    factor=st.sampled_from([1.01, 1.3, 2.0, 10.0]),
)
def test_a_faster_cluster_lengthens_no_step(
    axes: dict[str, int], sharding: Any, accumulation: int, batch: int, cluster: str, change: str, factor: float
) -> None:
    groups = {"axes": axes, "memory": {"sharding": sharding, "accumulation": accumulation}}
    plan = Plan.model_validate({**groups, "numerics": {"precision": "bf16"}})
    before = cluster_from_name(cluster)
    after = changed(before, f"{change}={factor}x")
    old, new = (predict_plan(machines, decoder(), plan, batch, ADAMW).step_s for machines in (before, after))
    assert new <= old * (1 + 1e-12)


class FreeHost(Runtime):
    """A runtime whose host launches at once."""

    def host_wait_s(self, launch_s: float, device_s: float = 0.0) -> float:
        return 0.0


class SlowHost(Runtime):
    """A runtime whose host takes a hundred times as long to launch."""

    def host_wait_s(self, launch_s: float, device_s: float = 0.0) -> float:
        return super().host_wait_s(100 * launch_s, device_s)


@pytest.mark.parametrize("axes", [{"replicate": 8}, {"shard": 8}])
def test_an_exchange_hides_behind_waiting_for_the_host(axes: dict[str, int]) -> None:
    """The GPU waits for its host or for the exchange, whichever takes longer, not for one after the other."""

    def step(runtime: Runtime, axes: dict[str, int]) -> StepTime:
        plan = Plan.model_validate({"axes": axes, "numerics": {"precision": "bf16"}})
        return predict_step(cluster_from_name("8xA100-80GB"), decoder(), plan, 1.0, ADAMW, runtime)

    (name,) = axes
    assert step(FreeHost(), axes).breakdown[name] > 0
    alone, together = step(SlowHost(), {}), step(SlowHost(), axes)
    assert together.step_s - together.breakdown["optimizer"] == pytest.approx(
        alone.step_s - alone.breakdown["optimizer"]
    )
