"""A layer that a plan splits and no group has: divided like the others, and put together behind itself."""

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
from tests.simulator.traffic import Exchange, exchanges

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
    """Its layer is normed behind, so no other one can sum up its parts."""

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


def plan(axis: str = "replicate", splits: dict[str, str] | None = None, **groups: Any) -> Plan:
    modules = {name: {"kind": kind, "axis": axis} for name, kind in (splits or {"4": "column"}).items()}
    more = groups.pop("modules", {})
    return Plan.model_validate(
        {"axes": {axis: RANKS, **groups.pop("axes", {})}, "modules": {"splits": modules, **more}, **groups}
    )


def sent(chosen: Plan, kind: Any = Classifier, recompute: str = "none") -> dict[tuple[str, float], int]:
    """What layers send: all but the gradients that are combined."""
    found = exchanges(traced(kind, recompute=recompute), chosen, BATCH)
    return {(e.collective, e.bytes): e.count for e in found if e.collective != "all_reduce" or e.axis == "tensor"}


@pytest.mark.parametrize(("name", "said"), [
    ("5", r"splits\.5: no layer of that name can be split: known are 0, 2, 4"),
    ("head", "no layer of that name"),
    ("1", "no layer of that name"),  # an activation
    ("*.0", "no layer of that name"),
])  # fmt: skip
def test_a_name_that_fits_nothing_is_told(name: str, said: str) -> None:
    for chosen in (plan(splits={name: "column"}), plan(splits={"0": "column", name: "none"})):
        with pytest.raises(InputError, match=said):
            split_shares(traced(), chosen)


def test_a_name_that_is_nearly_right_is_guessed() -> None:
    with pytest.raises(InputError, match=r"splits\.blocks\.0\.mixx: .*: did you mean 'blocks\.0\.mix'\?"):
        split_shares(traced(Tower), plan(splits={"blocks.0.mixx": "column"}))


def test_what_cannot_be_split_so() -> None:
    with pytest.raises(InputError, match=r"4 cannot be split over 8 ranks: they must divide 12 \(its features\)"):
        split_shares(traced(), plan(axes={"replicate": 8}))
    with pytest.raises(InputError, match="4 cannot be split by vocabulary: choose column or row"):
        split_shares(traced(), plan(splits={"4": "vocabulary"}))


def test_groups_alone_change_nothing() -> None:
    chosen = plan(splits={"0": "column", "2": "row"})
    assert with_standalone_splits(traced(), chosen) is traced()
    marked = with_standalone_splits(traced(), plan())
    assert with_standalone_splits(marked, plan()) is marked
    assert split_profile(traced(), plan(splits={"4": "none"})).parameters == traced().parameters


@pytest.mark.parametrize(("kind", "weight", "bias"), [("column", (3, WIDE), (3,)), ("row", (OUT, 8), (OUT,))])
@pytest.mark.parametrize("axis", ["replicate", "tensor"])
def test_a_rank_holds_its_part(axis: str, kind: str, weight: tuple[int, ...], bias: tuple[int, ...]) -> None:
    """The group is left whole, so that only the lone layer is split."""
    chosen = plan(axis, {"4": kind, "0": "none"})
    part = split_profile(traced(), chosen)
    shapes = {p.names[0]: p.shape for p in part.parameters}
    assert (shapes["4.weight"], shapes["4.bias"]) == (weight, bias)
    assert shapes["2.weight"] == (WIDE, WIDE)
    layer = 3 * 2 * WIDE * OUT * BATCH  # FLOPs: forward, and the gradients of input and weight
    expected = 0.0 if axis == "replicate" else layer * (1 - 1 / RANKS)
    assert traced().flops(BATCH) - part.flops(BATCH) == pytest.approx(expected)
    divided = {"4.weight", "4.bias"} if kind == "column" else {"4.weight"}
    assert replicate_split_parameters(traced(), chosen) == (divided if axis == "replicate" else set())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_holds_a_part_of_weights_gradients_and_state(precision: str) -> None:
    def needs(chosen: Plan) -> dict[str, int]:
        return predict_memory(traced(precision=precision), chosen, BATCH, MOMENTUM, CPU_MEMORY).breakdown

    numerics = {"precision": precision}
    whole = needs(Plan.model_validate({"axes": {"replicate": RANKS}, "numerics": numerics}))
    part = needs(plan(numerics=numerics))
    spared = (WIDE * OUT + OUT) * 4 * (1 - 1 / RANKS)
    for what in ("weights", "optimizer state", "gradient buckets"):
        assert whole[what] - part[what] == spared


@pytest.mark.parametrize(("kind", "ranks_more"), [("column", RANKS - 1), ("row", 0)])
def test_the_gathered_input_is_kept_until_the_gradient_of_the_weight(kind: str, ranks_more: int) -> None:
    part = split_profile(traced(), plan(splits={"4": kind}))
    more = part.saved_bytes(BATCH) - traced().saved_bytes(BATCH)
    assert more == ranks_more * WIDE * 4 * BATCH
    changes = [c for segment in part.segments for c in segment.changes if c.role == "saved"]
    before = [c for segment in traced().segments for c in segment.changes if c.role == "saved"]
    assert sum(c.bytes.at(BATCH) for c in changes) == sum(c.bytes.at(BATCH) for c in before)  # all is given back


def test_casts_of_the_weight_are_each_ranks_own() -> None:
    def cast(found: ModelProfile, layer: str) -> float:
        operators = [o for segment in found.segments for o in segment.operators if o.layer == layer]
        return max(o.bytes.constant for o in operators if o.name == "_to_copy")

    whole = traced(precision="bf16")
    part = split_profile(whole, plan(splits={"0": "column", "2": "row", "4": "column"}))
    for layer in ("0", "2", "4"):
        assert cast(part, layer) == pytest.approx(cast(whole, layer) / RANKS)


X, Y = BATCH * WIDE * 4, BATCH * OUT * 4  # a rank's own input and output of the lone layer


@pytest.mark.parametrize(("axis", "kind", "expected"), [
    ("replicate", "column", {("all_gather", RANKS * X): 1, ("reduce_scatter", RANKS * X): 1, ("all_to_all", Y): 2}),
    ("replicate", "row", {("all_gather", RANKS * Y): 1, ("reduce_scatter", RANKS * Y): 1, ("all_to_all", X): 2}),
    ("tensor", "column", {("all_gather", Y): 1, ("all_reduce", X): 1}),
    ("tensor", "row", {("all_reduce", Y): 1, ("all_gather", X): 1}),
])  # fmt: skip
def test_what_a_lone_layer_exchanges(axis: str, kind: str, expected: dict[tuple[str, float], int]) -> None:
    assert sent(plan(axis, {"4": kind, "0": "none"})) == expected


def test_single_vectors_have_no_sequence_to_be_divided_along() -> None:
    chosen = plan("tensor", {"4": "column", "0": "none"}, modules={"sequence": True})
    assert sent(chosen) == {("all_gather", Y): 1, ("all_reduce", X): 1}


def test_layers_in_a_row_scatter_and_gather_between_them() -> None:
    """Column, row and lone column over the replicate axis. The data that comes in needs no gradient."""
    chosen = plan(splits={"0": "column", "2": "row", "4": "column"})
    assert sent(chosen) == {
        ("all_gather", RANKS * BATCH * IN * 4): 1,  # into 0
        ("reduce_scatter", RANKS * X): 2,  # out of 2; back out of 4
        ("all_gather", RANKS * X): 2,  # into 4; back into 2
        ("all_to_all", Y): 2,  # out of 4, and back
    }
    combined = [e for e in exchanges(traced(), chosen, BATCH) if e.collective == "all_reduce"]
    assert combined == [Exchange("replicate", "all_reduce", WIDE * 4, 1)]  # the bias of 2, which stays whole


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("full", 1)])
def test_equal_blocks_exchange_alike_and_again_where_they_are_computed_again(recompute: str, again: int) -> None:
    """Of six blocks the first is given data: it sends no gradient of its input, unless it is computed again, when it
    cannot be told from the others."""
    chosen = plan(splits={"blocks.*.mix": "column"}, memory={"recompute": recompute})
    marked = with_standalone_splits(traced(Tower, recompute=recompute), chosen)
    assert {f"blocks.{number}.mix" for number in range(6)} == set(split_shares(marked, chosen))
    found = sent(chosen, Tower, recompute)
    assert found["all_gather", RANKS * X] == 6 + 6 * again
    assert found["all_to_all", X] == 2 * 6 + 6 * again
    assert found["reduce_scatter", RANKS * X] == 5 + again


def test_a_recomputed_input_is_kept_for_its_backward_pass_only() -> None:
    whole = traced(Tower, recompute="full")
    part = split_profile(whole, plan(splits={"blocks.*.mix": "column"}, memory={"recompute": "full"}))
    assert part.saved_bytes(BATCH) == whole.saved_bytes(BATCH)
    for segment, before in zip(part.segments, whole.segments, strict=True):
        assert sum(c.bytes.at(1) for c in segment.changes if c.role == "temporary") == pytest.approx(
            sum(c.bytes.at(1) for c in before.changes if c.role == "temporary")
        )


def test_stages_find_the_layers_of_other_stages_named() -> None:
    shape = {"cuts": ["blocks.2"], "microbatches": 4}
    chosen = plan(splits={"blocks.5.mix": "column", "head": "column"}, axes={"pipeline": 2}, pipeline=shape)
    found = predict_step(cluster_from_name("8xA100-80GB"), traced(Tower), chosen, BATCH, MOMENTUM, EAGER)
    assert found.breakdown["tensor"] > 0
    first, last = (exchanges(traced(Tower), chosen, BATCH, pipeline_rank=rank) for rank in (0, 1))
    assert not any(e.collective == "all_to_all" for e in first)
    assert any(e.collective == "all_to_all" for e in last)


def test_the_step_sends_the_gradients_of_the_others_only() -> None:
    cluster = cluster_from_name("8xV100@PCIe3-x16")
    whole = Plan.model_validate({"axes": {"replicate": RANKS}})
    split = plan(splits={"0": "column", "2": "row", "4": "column"})
    replicate = [
        predict_step(cluster, traced(), chosen, BATCH, MOMENTUM, EAGER).breakdown["replicate"]
        for chosen in (whole, split)
    ]
    of_bias = gradient_exchange(WIDE * 4, 0, whole, cluster, EAGER)  # of the row, which stays whole
    assert replicate[0] > replicate[1] == pytest.approx(of_bias.replicate_s)
