"""A layer that a plan splits although it belongs to no group of layers: its weight is divided like those of groups, and
its output is gathered right after it."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.cluster.names import cluster_from_name
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.communication.exchange import gradient_exchange
from meshwright.simulator.memory.device_memory import CPU_MEMORY
from meshwright.simulator.memory.peak import predict_memory
from meshwright.simulator.runtime import OUR_RUNTIME
from meshwright.simulator.step import predict_step
from meshwright.simulator.tensor.split_profile import replicate_split_parameters, split_profile, split_shares
from meshwright.simulator.tensor.standalone_splits import with_standalone_splits
from meshwright.simulator.traffic import Exchange, exchanges

RANKS, BATCH = 4, 8
IN, WIDE, OUT = 48, 32, 12
MOMENTUM = OptimizerCost(state_ratio=1.0, temporary_ratio=0.0, multi_tensor=True)
EAGER = OUR_RUNTIME


class Classifier(nn.Sequential):
    """Three layers in a row, like VGG16's: the first two are a group, the last (4) is in none."""

    def __init__(self) -> None:
        layers = [nn.Linear(IN, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, OUT)]
        super().__init__(*layers)


class Block(nn.Module):
    """A norm follows the layer, so no other layer can sum its partial results."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(WIDE, WIDE), nn.LayerNorm(WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.norm(self.mix(x)))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDE, OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@cache
def traced(kind: Any = Classifier, precision: str = "fp32", recompute: Any = "none") -> ModelProfile:
    with torch.device("meta"):
        batch = torch.empty(2, IN if kind is Classifier else WIDE), torch.empty(2, dtype=torch.long)
        return trace_profile(
            kind(), batch, F.cross_entropy, precision=precision, recompute=recompute, with_structure=True
        )


def split_plan(axis: str = "replicate", splits: dict[str, str] | None = None, **groups: Any) -> Plan:
    modules = {name: {"kind": kind, "axis": axis} for name, kind in (splits or {"4": "column"}).items()}
    other_modules = groups.pop("modules", {})
    return Plan.model_validate(
        {"axes": {axis: RANKS, **groups.pop("axes", {})}, "modules": {"splits": modules, **other_modules}, **groups}
    )


def layer_messages(plan: Plan, kind: Any = Classifier, recompute: str = "none") -> dict[tuple[str, float], int]:
    """Returns how often split layers exchange, by collective and bytes, without the gradients that replicas average."""
    step_exchanges = exchanges(traced(kind, recompute=recompute), plan, BATCH)
    return {
        (e.collective, e.bytes): e.count for e in step_exchanges if e.collective != "all_reduce" or e.axis == "tensor"
    }


@pytest.mark.parametrize(("name", "message"), [
    ("5", r"splits\.5: no layer of that name can be split: known are 0, 2, 4"),
    ("head", "no layer of that name"),
    ("1", "no layer of that name"),  # an activation
    ("*.0", "no layer of that name"),
])  # fmt: skip
def test_a_name_that_matches_no_layer_is_refused(name: str, message: str) -> None:
    for plan in (split_plan(splits={name: "column"}), split_plan(splits={"0": "column", name: "none"})):
        with pytest.raises(InputError, match=message):
            split_shares(traced(), plan)


def test_a_misspelled_name_gets_a_suggestion() -> None:
    with pytest.raises(InputError, match=r"splits\.blocks\.0\.mixx: .*: did you mean 'blocks\.0\.mix'\?"):
        split_shares(traced(Tower), split_plan(splits={"blocks.0.mixx": "column"}))


def test_splits_that_a_layer_does_not_have_are_refused() -> None:
    with pytest.raises(InputError, match=r"4 cannot be split over 8 ranks: they must divide 12 \(its features\)"):
        split_shares(traced(), split_plan(axes={"replicate": 8}))
    with pytest.raises(InputError, match="4 cannot be split by vocabulary: choose column or row"):
        split_shares(traced(), split_plan(splits={"4": "vocabulary"}))


def test_a_plan_without_standalone_splits_changes_nothing() -> None:
    plan = split_plan(splits={"0": "column", "2": "row"})
    assert with_standalone_splits(traced(), plan) is traced()
    marked = with_standalone_splits(traced(), split_plan())
    assert with_standalone_splits(marked, split_plan()) is marked
    assert split_profile(traced(), split_plan(splits={"4": "none"})).parameters == traced().parameters


@pytest.mark.parametrize(("kind", "weight", "bias"), [("column", (3, WIDE), (3,)), ("row", (OUT, 8), (OUT,))])
@pytest.mark.parametrize("axis", ["replicate", "tensor"])
def test_a_rank_holds_its_share_of_the_layer(
    axis: str, kind: str, weight: tuple[int, ...], bias: tuple[int, ...]
) -> None:
    """The group of layers is not split, only the standalone layer."""
    plan = split_plan(axis, {"4": kind, "0": "none"})
    part = split_profile(traced(), plan)
    shapes = {p.names[0]: p.shape for p in part.parameters}
    assert (shapes["4.weight"], shapes["4.bias"]) == (weight, bias)
    assert shapes["2.weight"] == (WIDE, WIDE)
    layer = 3 * 2 * WIDE * OUT * BATCH  # FLOPs: forward, and the gradients of input and weight
    expected = 0.0 if axis == "replicate" else layer * (1 - 1 / RANKS)
    assert traced().flops(BATCH) - part.flops(BATCH) == pytest.approx(expected)
    divided = {"4.weight", "4.bias"} if kind == "column" else {"4.weight"}
    assert replicate_split_parameters(traced(), plan) == (divided if axis == "replicate" else set())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_holds_a_part_of_weights_gradients_and_state(precision: str) -> None:
    def needs(plan: Plan) -> dict[str, int]:
        return predict_memory(traced(precision=precision), plan, BATCH, MOMENTUM, CPU_MEMORY).breakdown

    numerics = {"precision": precision}
    whole = needs(Plan.model_validate({"axes": {"replicate": RANKS}, "numerics": numerics}))
    part = needs(split_plan(numerics=numerics))
    saved_bytes = (WIDE * OUT + OUT) * 4 * (1 - 1 / RANKS)
    for part_name in ("weights", "optimizer state", "gradient buckets"):
        assert whole[part_name] - part[part_name] == saved_bytes


@pytest.mark.parametrize(("kind", "gathered_ranks"), [("column", RANKS - 1), ("row", 0)])
def test_the_gathered_input_is_kept_until_the_gradient_of_the_weight(kind: str, gathered_ranks: int) -> None:
    part = split_profile(traced(), split_plan(splits={"4": kind}))
    added_bytes = part.saved_bytes(BATCH) - traced().saved_bytes(BATCH)
    assert added_bytes == gathered_ranks * WIDE * 4 * BATCH
    changes = [c for segment in part.segments for c in segment.changes if c.role == "saved"]
    before = [c for segment in traced().segments for c in segment.changes if c.role == "saved"]
    assert sum(c.bytes.at(BATCH) for c in changes) == sum(c.bytes.at(BATCH) for c in before)  # everything is freed


def test_a_rank_casts_only_its_share_of_the_weight() -> None:
    def cast_bytes(profile: ModelProfile, layer: str) -> float:
        operators = [o for segment in profile.segments for o in segment.operators if o.layer == layer]
        return max(o.bytes.constant for o in operators if o.name == "_to_copy")

    whole = traced(precision="bf16")
    part = split_profile(whole, split_plan(splits={"0": "column", "2": "row", "4": "column"}))
    for layer in ("0", "2", "4"):
        assert cast_bytes(part, layer) == pytest.approx(cast_bytes(whole, layer) / RANKS)


X, Y = BATCH * WIDE * 4, BATCH * OUT * 4  # bytes of a rank's input and output of the standalone layer


@pytest.mark.parametrize(("axis", "kind", "expected"), [
    ("replicate", "column", {("all_gather", RANKS * X): 1, ("reduce_scatter", RANKS * X): 1, ("all_to_all", Y): 2}),
    ("replicate", "row", {("all_gather", RANKS * Y): 1, ("reduce_scatter", RANKS * Y): 1, ("all_to_all", X): 2}),
    ("tensor", "column", {("all_gather", Y): 1, ("all_reduce", X): 1}),
    ("tensor", "row", {("all_reduce", Y): 1, ("all_gather", X): 1}),
])  # fmt: skip
def test_the_messages_of_a_standalone_layer(axis: str, kind: str, expected: dict[tuple[str, float], int]) -> None:
    assert layer_messages(split_plan(axis, {"4": kind, "0": "none"})) == expected


def test_inputs_without_a_sequence_are_not_divided_along_it() -> None:
    plan = split_plan("tensor", {"4": "column", "0": "none"}, modules={"sequence": True})
    assert layer_messages(plan) == {("all_gather", Y): 1, ("all_reduce", X): 1}
    assert split_profile(traced(), plan) == split_profile(traced(), split_plan("tensor", {"4": "column", "0": "none"}))


def test_consecutive_split_layers_scatter_and_gather_between_them() -> None:
    """The layers are split by column, row and standalone column over the replicate axis. The input has no gradient."""
    plan = split_plan(splits={"0": "column", "2": "row", "4": "column"})
    assert layer_messages(plan) == {
        ("all_gather", RANKS * BATCH * IN * 4): 1,  # before 0
        ("reduce_scatter", RANKS * X): 2,  # after 2; backward of 4
        ("all_gather", RANKS * X): 2,  # before 4; backward of 2
        ("all_to_all", Y): 2,  # after 4, forward and backward
    }
    averaged = [e for e in exchanges(traced(), plan, BATCH) if e.collective == "all_reduce"]
    assert averaged == [Exchange("replicate", "all_reduce", WIDE * 4, 1)]  # the bias of 2, which is not split


@pytest.mark.parametrize(("recompute", "recomputed_passes"), [("none", 0), ("full", 1)])
def test_equal_blocks_send_the_same_messages_and_repeat_them_when_recomputed(
    recompute: str, recomputed_passes: int
) -> None:
    """The input of the first of six blocks is data, so no gradient of it is sent. With recomputation all six blocks
    send the same messages."""
    plan = split_plan(splits={"blocks.*.mix": "column"}, memory={"recompute": recompute})
    marked = with_standalone_splits(traced(Tower, recompute=recompute), plan)
    assert {f"blocks.{number}.mix" for number in range(6)} == set(split_shares(marked, plan))
    messages = layer_messages(plan, Tower, recompute)
    assert messages["all_gather", RANKS * X] == 6 + 6 * recomputed_passes
    assert messages["all_to_all", X] == 2 * 6 + 6 * recomputed_passes
    assert messages["reduce_scatter", RANKS * X] == 5 + recomputed_passes


def test_a_recomputed_input_is_kept_for_its_backward_pass_only() -> None:
    whole = traced(Tower, recompute="full")
    part = split_profile(whole, split_plan(splits={"blocks.*.mix": "column"}, memory={"recompute": "full"}))
    assert part.saved_bytes(BATCH) == whole.saved_bytes(BATCH)
    for segment, before in zip(part.segments, whole.segments, strict=True):
        assert sum(c.bytes.at(1) for c in segment.changes if c.role == "temporary") == pytest.approx(
            sum(c.bytes.at(1) for c in before.changes if c.role == "temporary")
        )


def test_a_plan_may_name_layers_of_any_stage() -> None:
    shape = {"cuts": ["blocks.2"], "microbatches": 4}
    plan = split_plan(splits={"blocks.5.mix": "column", "head": "column"}, axes={"pipeline": 2}, pipeline=shape)
    step = predict_step(cluster_from_name("8xA100-80GB"), traced(Tower), plan, BATCH, MOMENTUM, EAGER)
    assert step.breakdown["tensor"] > 0
    first, last = (exchanges(traced(Tower), plan, BATCH, pipeline_rank=rank) for rank in (0, 1))
    assert not any(e.collective == "all_to_all" for e in first)
    assert any(e.collective == "all_to_all" for e in last)


def test_gradients_of_split_layers_are_not_averaged() -> None:
    cluster = cluster_from_name("8xV100@PCIe3-x16")
    whole = Plan.model_validate({"axes": {"replicate": RANKS}})
    split = split_plan(splits={"0": "column", "2": "row", "4": "column"})
    samples = 2**16  # the device does not wait for its host, behind which exchanges would hide
    averaging_s = [
        predict_step(cluster, traced(), plan, samples, MOMENTUM, EAGER).breakdown["replicate"]
        for plan in (whole, split)
    ]
    bias_exchange = gradient_exchange(WIDE * 4, 0, whole, cluster, EAGER)  # the bias of the row split is not split
    assert averaging_s[0] > averaging_s[1] == pytest.approx(bias_exchange.replicate_s)
