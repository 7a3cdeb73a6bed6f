"""The parts of a predicted step time add up, and change as the fields of the plan suggest."""

from functools import cache
from typing import Any

import pytest
import torch

from meshwright.cluster.names import cluster_from_name
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.communication.collectives import collective_s
from meshwright.simulator.communication.placement import RankGroup
from meshwright.simulator.compute.operator_time import device_speeds
from meshwright.simulator.runtime import OUR_RUNTIME, Runtime
from meshwright.simulator.step import StepTime, predict_step
from meshwright.simulator.tensor.split_profile import split_profile
from meshwright.workloads.text.decoder import Decoder
from tests.profile.models import scores_loss

ADAMW = OptimizerCost(state_ratio=2.0, temporary_ratio=0.0, multi_tensor=True)
PARTS = {"compute", "launch", "tensor", "pipeline", "shard", "replicate", "bubble", "optimizer", "input"}


@cache
def traced(recompute: str = "none", tied: bool = False) -> ModelProfile:
    with torch.device("meta"):
        tokens = torch.empty(2, 512, dtype=torch.long)
        model = Decoder(layers=8, hidden=1024, heads=16, sequence=512, vocabulary=4096, tied=tied)
    kind: Any = recompute
    return trace_profile(model, (tokens, tokens), scores_loss, precision="bf16", recompute=kind, with_structure=True)


def step(runtime: Runtime = OUR_RUNTIME, batch: float = 8.0, cluster: str = "8xA100-80GB", **groups: Any) -> StepTime:
    plan = Plan.model_validate({"numerics": {"precision": "bf16"}, **groups})
    return predict_step(cluster_from_name(cluster), traced(plan.memory.recompute), plan, batch, ADAMW, runtime)


def pipeline(microbatches: int) -> dict[str, Any]:
    cuts = [f"blocks.{last}" for last in (1, 3, 5)]
    return {"axes": {"pipeline": 4}, "pipeline": {"microbatches": microbatches, "cuts": cuts}}


@pytest.mark.parametrize(
    "groups",
    [
        {},
        {"axes": {"replicate": 8}},
        {"axes": {"shard": 8}},
        {"axes": {"shard": 8}, "memory": {"sharding": "optimizer", "accumulation": 4}},
        {"axes": {"tensor": 4, "replicate": 2}, "modules": {"sequence": True}},
        pipeline(8),
    ],
)
def test_the_breakdown_adds_up_to_the_step(groups: dict[str, Any]) -> None:
    predicted = step(**groups)
    assert set(predicted.breakdown) == PARTS
    assert sum(predicted.breakdown.values()) == pytest.approx(predicted.step_s)
    assert min(predicted.breakdown.values()) >= 0


def test_more_microbatches_leave_less_of_a_pipeline_idle() -> None:
    idle = [(time := step(**pipeline(count))).breakdown["bubble"] / time.step_s for count in (4, 8, 32)]
    assert idle[0] > idle[1] > idle[2] > 0


def test_each_further_microbatch_of_a_pipeline_takes_the_same_time() -> None:
    shorter, longer = step(**pipeline(96)).step_s, step(**pipeline(100)).step_s
    assert (longer - shorter) / 4 == pytest.approx((longer - step(**pipeline(20)).step_s) / 80, rel=0.02)


def test_weights_are_gathered_for_every_microbatch_only_where_they_are_divided() -> None:
    def shard(level: str, rounds: int) -> float:
        memory = {"sharding": level, "accumulation": rounds}
        return step(axes={"shard": 16}, memory=memory, cluster="2x8xA100-80GB").breakdown["shard"]

    assert shard("parameters", 4) == pytest.approx(4 * shard("parameters", 1))
    assert shard("optimizer", 4) == pytest.approx(shard("optimizer", 1))
    assert shard("optimizer", 4) < shard("gradients", 4) < shard("parameters", 4)


@pytest.mark.parametrize(
    ("memory", "axes", "adds"),
    [
        ({"accumulation": 1}, {}, 0),
        ({"accumulation": 4}, {}, 3),
        ({"accumulation": 4, "sharding": "optimizer"}, {"shard": 8}, 3),
        ({"accumulation": 4}, {"shard": 8}, 3 / 8),  # scattered after each microbatch; a rank adds its shard
    ],
)
def test_gradients_of_all_microbatches_but_the_first_are_added(
    memory: dict[str, Any], axes: dict[str, int], adds: float
) -> None:
    some, none = (
        step(Runtime(accumulate_bytes_per_weight=sums), axes=axes, memory=memory).breakdown["compute"]
        for sums in (12.0, 0.0)
    )
    weights = sum(parameter.bytes for parameter in traced().parameters) / 4
    device = cluster_from_name("8xA100-80GB").nodes[0].device
    assert some - none == pytest.approx(
        adds * 12 * weights / device_speeds(device, "bf16").bandwidth_bytes_per_s, abs=1e-9
    )


@pytest.mark.soak
def test_gradients_of_a_table_that_two_stages_use_are_summed_once_a_step() -> None:
    def spent(many: int, tied: bool) -> float:
        plan = Plan.model_validate({"numerics": {"precision": "bf16"}, **pipeline(many)})
        return predict_step(machines, traced(tied=tied), plan, 1.0, ADAMW).breakdown["pipeline"]

    machines = cluster_from_name("4x1xA100-80GB")
    table = 4096 * 1024 * 4
    once = collective_s("all_reduce", table, RankGroup(2, nodes=2), machines)
    for many in (8, 16):
        assert spent(many, tied=True) - spent(many, tied=False) == pytest.approx(once, rel=0.05)


def test_stages_that_wait_for_their_sends_lose_more_time() -> None:
    """Middle stages send twice in every microbatch. Without the wait, computation hides a part: a fourth for four
    stages."""

    def spent(waits: bool) -> float:
        plan = Plan.model_validate({"numerics": {"precision": "bf16"}, **pipeline(64)})
        runtime = Runtime(waits_for_sends=waits)
        predicted = predict_step(cluster_from_name("4x1xA100-80GB@Ethernet-10G"), traced(), plan, 8.0, ADAMW, runtime)
        return predicted.breakdown["pipeline"]

    assert spent(waits=True) == pytest.approx(4 / 3 * spent(waits=False), rel=0.1)


@pytest.mark.soak
def test_a_backward_pass_that_recomputes_blocks_is_not_split_to_fill_the_bubble() -> None:
    def bubble_s(schedule: str, recompute: str) -> float:
        groups = pipeline(16)
        groups["pipeline"]["schedule"] = schedule
        return step(**groups, memory={"recompute": recompute}).breakdown["bubble"]

    assert bubble_s("zero_bubble", "none") < 0.7 * bubble_s("1f1b", "none")
    assert bubble_s("zero_bubble", "full") == pytest.approx(bubble_s("1f1b", "full"))


class SlowHost(Runtime):
    """A runtime whose host takes ten times as long to start operators."""

    def host_wait_s(self, launch_s: float, device_s: float = 0.0) -> float:
        return super().host_wait_s(10 * launch_s, device_s)


def test_launch_overhead_counts_only_beyond_the_work_of_the_device() -> None:
    assert step(SlowHost(), batch=1.0).breakdown["launch"] > 0
    assert step(batch=512.0).breakdown["launch"] == 0


def test_a_rank_casts_only_its_share_of_split_weights() -> None:
    run = OUR_RUNTIME.executed_profile(traced())

    def cast_bytes(profile: ModelProfile) -> float:
        operators = [o for segment in profile.segments for o in segment.operators if o.layer.endswith("feedforward.up")]
        return max(o.bytes.at(1) for o in operators if o.name == "_to_copy" and not o.shape[0].linear)

    split = split_profile(run, Plan.model_validate({"axes": {"tensor": 8}}))
    assert cast_bytes(split) == pytest.approx(cast_bytes(run) / 8)
