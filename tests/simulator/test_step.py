"""A step's seconds: they add up, and move the way the parts of a plan push them."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from meshwright.cluster.names import named
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.tracing.trace import profile
from meshwright.profile.values import Growth, ModelProfile
from meshwright.simulator.communication.collectives import collective_s
from meshwright.simulator.communication.placement import Group
from meshwright.simulator.compute.engine_profile import padded, run_by
from meshwright.simulator.compute.lookup import looked_up
from meshwright.simulator.compute.operator_time import speeds
from meshwright.simulator.engine import Engine, engines, find_engine
from meshwright.simulator.step import StepTime, predict_step
from meshwright.simulator.tensor.split_profile import split_profile
from meshwright.workloads.text.decoder import Decoder
from tests.profile.models import scores_loss

ADAMW = OptimizerCost(state=2.0, temporary=0.0, at_once=True)
PARTS = {"compute", "launch", "tensor", "pipeline", "shard", "replicate", "bubble", "optimizer", "input"}


@cache
def traced(recompute: str = "none", tied: bool = False) -> ModelProfile:
    with torch.device("meta"):
        tokens = torch.empty(2, 512, dtype=torch.long)
        model = Decoder(layers=8, hidden=1024, heads=16, sequence=512, vocabulary=4096, tied=tied)
    kind: Any = recompute
    return profile(model, (tokens, tokens), scores_loss, precision="bf16", recompute=kind, structured=True)


def step(engine: Engine | None = None, batch: float = 8.0, cluster: str = "8xA100-80GB", **groups: Any) -> StepTime:
    plan = Plan.model_validate({"numerics": {"precision": "bf16"}, **groups})
    return predict_step(
        named(cluster), traced(plan.memory.recompute), plan, batch, ADAMW, engine or find_engine("meshwright")
    )


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
    found = step(**groups)
    assert set(found.breakdown) == PARTS
    assert sum(found.breakdown.values()) == pytest.approx(found.step_s)
    assert min(found.breakdown.values()) >= 0


def test_more_microbatches_leave_less_of_a_pipeline_idle() -> None:
    idle = [(found := step(**pipeline(many))).breakdown["bubble"] / found.step_s for many in (4, 8, 32)]
    assert idle[0] > idle[1] > idle[2] > 0


def test_a_long_pipeline_is_a_short_one_and_its_rounds() -> None:
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
        ({"accumulation": 4}, {"shard": 8}, 3 / 8),  # scattered after each, and a part is added
    ],
)
def test_gradients_of_all_microbatches_but_the_first_are_added(
    memory: dict[str, Any], axes: dict[str, int], adds: float
) -> None:
    some, none = (
        step(Engine(name="sums", accumulate_bytes_per_weight=sums), axes=axes, memory=memory).breakdown["compute"]
        for sums in (12.0, 0.0)
    )
    weights = sum(parameter.bytes for parameter in traced().parameters) / 4
    device = named("8xA100-80GB").nodes[0].device
    assert some - none == pytest.approx(adds * 12 * weights / speeds(device, "bf16").bandwidth_bytes_per_s, abs=1e-9)


def test_gradients_of_a_table_that_two_stages_use_are_summed_once_a_step() -> None:
    def spent(many: int, tied: bool) -> float:
        plan = Plan.model_validate({"numerics": {"precision": "bf16"}, **pipeline(many)})
        return predict_step(machines, traced(tied=tied), plan, 1.0, ADAMW, Engine(name="plain")).breakdown["pipeline"]

    machines = named("4x1xA100-80GB")
    table = 4096 * 1024 * 4
    once = collective_s("all_reduce", table, Group(2, nodes=2), machines)
    for many in (8, 16):
        assert spent(many, tied=True) - spent(many, tied=False) == pytest.approx(once, rel=0.05)


def test_stages_that_wait_for_what_they_send_lose_more_time() -> None:
    """Those in the middle send twice in every microbatch, of which otherwise a part hides: of four stages, a fourth."""

    def spent(waits: bool) -> float:
        plan = Plan.model_validate({"numerics": {"precision": "bf16"}, **pipeline(64)})
        engine = Engine(name="sends", sends_wait=waits)
        found = predict_step(named("4x1xA100-80GB@Ethernet-10G"), traced(), plan, 8.0, ADAMW, engine)
        return found.breakdown["pipeline"]

    assert spent(waits=True) == pytest.approx(4 / 3 * spent(waits=False), rel=0.1)


def test_a_host_is_waited_for_only_behind_all_that_the_device_does() -> None:
    slow = step(Engine(name="slow", launch=10.0), batch=1.0)
    assert slow.breakdown["launch"] > 0
    assert step(Engine(name="no host", launch=0.0), batch=1.0).breakdown["launch"] == 0
    waiting = step(Engine(name="waiting", waits=True), batch=512.0)
    assert waiting.breakdown["launch"] > 0, "for every operator, however long it takes"
    assert step(Engine(name="ahead"), batch=512.0).breakdown["launch"] == 0
    computing = step(Engine(name="slower too", launch=10.0, attention=2.0), batch=1.0)
    assert computing.step_s == pytest.approx(slow.step_s)


def test_engines_run_less_than_eager_pytorch() -> None:
    eager = step().step_s
    assert step(find_engine("megatron")).step_s < eager
    assert step(Engine(name="scores", scores=True)).step_s > eager
    assert all(name == engine.name for name, engine in engines().items())


def test_casts_of_split_weights_are_each_ranks_own() -> None:
    run = run_by(traced(), find_engine("meshwright"))

    def cast(found: ModelProfile) -> float:
        operators = [o for stretch in found.stretches for o in stretch.operators if o.layer.endswith("feedforward.up")]
        return max(o.bytes.at(1) for o in operators if o.name == "_to_copy" and not o.shape[0].linear)

    split = split_profile(run, Plan.model_validate({"axes": {"tensor": 8}}))
    assert cast(split) == pytest.approx(cast(run) / 8)


@pytest.mark.parametrize("fused", [False, True])
def test_casts_of_activations_are_part_of_fused_kernels(fused: bool) -> None:
    """Those of weights are not; what was computed in fp32 between casts moves half as many bytes."""

    def found(engine: Engine) -> tuple[set[bool], float]:
        operators = [o for s in run_by(traced(), engine).stretches if s.blocks for o in s.operators]
        casts = {bool(o.shape[0].linear) for o in operators if o.name == "_to_copy"}
        return casts, sum(o.bytes.linear for o in operators if o.kind == "norm" and o.dtype == "float32")

    casts, norms = found(Engine(name="one", fused=fused))
    assert casts == ({False} if fused else {False, True})
    assert norms == pytest.approx(found(Engine(name="eager"))[1] / (2 if fused else 1))
    assert norms


def test_a_vocabulary_is_padded_and_attention_is_not() -> None:
    def sides(many: float) -> list[float]:
        stretch = traced().stretches[0]
        product = next(o for s in traced().stretches for o in s.operators if o.kind == "matmul")
        odd = replace(product, shape=tuple(Growth(size, 0.0) for size in (many, 2048.0, 225.0, 64.0)))
        made = replace(traced(), stretches=(replace(stretch, operators=(odd,)),))
        return [size.constant for size in padded(made, find_engine("megatron")).stretches[0].operators[0].shape]

    assert sides(1.0) == [1.0, 2048.0, 256.0, 64.0]
    assert sides(16.0) == [16.0, 2048.0, 225.0, 64.0]


@pytest.mark.parametrize(
    ("fused", "drops", "between"),
    [
        (True, True, {"fused_log_softmax", "native_dropout"}),
        (False, True, {"masked_fill", "softmax", "native_dropout"}),
        (False, False, {"masked_fill", "softmax"}),
    ],
)
def test_scores_are_gone_over_as_the_engine_does_it(fused: bool, drops: bool, between: set[str]) -> None:
    found = traced()
    only = tuple(replace(s, operators=tuple(o for o in s.operators if o.kind == "attention")) for s in found.stretches)
    engine = Engine(name="scores", scores=True, fused=fused, drops_scores=drops)
    run = run_by(replace(found, stretches=only), engine)
    assert {o.name for s in run.stretches for o in s.operators} == between | {"bmm"}


@pytest.mark.parametrize(("views", "moved"), [(False, 2 + 3), (True, 2 + 3 + 1 + 5 * 2)])
def test_a_mask_in_a_view_copies_the_gradient_of_all_scores(views: bool, moved: int) -> None:
    """Counted by the profiler beside PyTorch's own softmax: one buffer zeroed, five copies."""
    found = traced()
    only = tuple(
        replace(s, operators=tuple(replace(o, dtype="float32") for o in s.operators if o.kind == "attention"))
        for s in found.stretches
        if s.phase == "backward"
    )
    engine = Engine(name="scores", scores=True, drops_scores=False, masks_views=views)
    run = run_by(replace(found, stretches=only), engine)
    between = [o for s in run.stretches for o in s.operators if o.name != "bmm"]
    pairs = next(o.shape[0].at(1) for o in between)
    attentions = sum(o.name == "softmax" for o in between)
    looked = [looked_up(operator, 1, 1.0, True, 1.0) for operator in between]
    assert sum(one.bytes for one in looked if one) == pytest.approx(4 * moved * pairs * attentions)


@pytest.mark.parametrize(("plain", "moved"), [(False, 8 + 4 + 8 + 12), (True, 6 + 4 + 8 + 8 + 4 + 8 + 8 + 6)])
def test_a_loss_line_by_line_goes_over_all_scores_with_each(plain: bool, moved: int) -> None:
    found = traced()
    names = ("_log_softmax", "nll_loss_forward", "nll_loss_backward", "_log_softmax_backward_data")
    only = tuple(replace(s, operators=tuple(o for o in s.operators if o.name in names)) for s in found.stretches)
    run = run_by(replace(found, stretches=only), Engine(name="loss", plain_loss=plain, half_weights=plain))
    looked = [
        looked_up(operator, 1, 1.0, stretch.phase == "backward", 1.0)
        for stretch in run.stretches
        for operator in stretch.operators
    ]
    assert sum(one.bytes for one in looked if one) == pytest.approx(moved * 512 * 4096, rel=0.01)


def test_scores_of_wider_numbers_move_more_bytes() -> None:
    def moved(dtype: str) -> float:
        found = traced()
        stretches = tuple(
            replace(s, operators=tuple(replace(o, dtype=dtype) for o in s.operators if o.kind == "attention"))
            for s in found.stretches
        )
        run = run_by(replace(found, stretches=stretches), Engine(name="scores", scores=True))
        return sum(s.count * o.bytes.at(1) for s in run.stretches for o in s.operators)

    assert moved("float32") == pytest.approx(2 * moved("bfloat16"), rel=0.1)
