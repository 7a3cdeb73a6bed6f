"""Mixtures of experts, unedited, train the same under plans with an expert axis: in fp64 with experts in their eager
form, a loop over the used ones. Batches are padded, some labels are ignored, the last batch is short and gradients are
clipped."""

from pathlib import Path
from typing import Any

import pytest

from meshwright.plan import Plan
from tests.proof.models.test_transformers import prove_plan
from tests.ranks import RankPool, ranks
from tests.soaked import all_but

MIXTURES = ("mixtral", "qwen3 mixture", "deepseek")
TWICE = {"memory": {"accumulation": 2}}
STAGES = {"pipeline": {"cuts": ["model.layers.0"], "microbatches": 2}}
PLANS: dict[str, dict[str, Any]] = {
    "R2E2": {"axes": {"replicate": 2, "expert": 2}, **TWICE},
    "S2E2": {"axes": {"shard": 2, "expert": 2}, **TWICE},
    "R4E2": {"axes": {"replicate": 4, "expert": 2}},
    "R4E4": {"axes": {"replicate": 4, "expert": 4}},
    "S4E2": {"axes": {"shard": 4, "expert": 2}, **TWICE},
    "S4E2 gradients": {"axes": {"shard": 4, "expert": 2}, "memory": {"accumulation": 2, "sharding": "gradients"}},
    "R2S2E2": {"axes": {"replicate": 2, "shard": 2, "expert": 2}},
    "R2T2E2": {"axes": {"replicate": 2, "tensor": 2, "expert": 2}},
    "S2T2E2 sequence": {"axes": {"shard": 2, "tensor": 2, "expert": 2}, "modules": {"sequence": True}},
    "R2P2E2": {"axes": {"replicate": 2, "pipeline": 2, "expert": 2}, **STAGES},
    "S2P2E2": {"axes": {"shard": 2, "pipeline": 2, "expert": 2}, **STAGES},
    "S4T2E2": {"axes": {"shard": 4, "tensor": 2, "expert": 2}},
    "R2S2P2E2": {"axes": {"replicate": 2, "shard": 2, "pipeline": 2, "expert": 2}, **STAGES},
    "R2S2T2E2": {"axes": {"replicate": 2, "shard": 2, "tensor": 2, "expert": 2}, **TWICE},
    "S2E2 full": {"axes": {"shard": 2, "expert": 2}, "memory": {"recompute": "full", "accumulation": 2}},
    "R2T2P2E2": {"axes": {"replicate": 2, "tensor": 2, "pipeline": 2, "expert": 2}, **STAGES},
    "S2T2P2E2": {"axes": {"shard": 2, "tensor": 2, "pipeline": 2, "expert": 2}, **STAGES},
    "R8E4": {"axes": {"replicate": 8, "expert": 4}},
    "S8E4": {"axes": {"shard": 8, "expert": 4}},
    "R2S4E4": {"axes": {"replicate": 2, "shard": 4, "expert": 4}},
}
# An expert that gets no token, and choices that are dropped because of a capacity: also as a short last batch.
OF_UNUSED = ("R2E2", "S2E2", "S4E2", "R4E4", "R2T2E2", "R2P2E2", "R2S2E2")
OF_CAPACITY = ("R2E2", "S2E2", "R4E2", "R4E4", "S4E2", "R2S2E2")
OF_LISTS = ("R2E2", "S2E2", "R4E2", "R4E4", "R2S2E2")
EACH = [f"{name}: {plan}" for name in MIXTURES for plan in PLANS] + [f"listed experts: {plan}" for plan in OF_LISTS]
EACH += [f"unused expert: {plan}" for plan in OF_UNUSED] + [f"decoder with a capacity: {plan}" for plan in OF_CAPACITY]
QUICK = {"mixtral: R2E2", "listed experts: R2S2E2"}


def world_size(plan: str) -> int:
    axes = {**PLANS[plan]["axes"], "expert": 1}
    size = 1
    for factor in axes.values():
        size *= factor
    return size


@pytest.mark.parametrize("case", all_but(QUICK, sorted(EACH, key=lambda case: world_size(case.split(": ")[1]))))
def test_a_mixture_of_experts_is_proved(two: RankPool, four: RankPool, case: str, tmp_path: Path) -> None:
    name, plan = case.split(": ")
    size = world_size(plan)
    with ranks(size) as pool:
        proof = {2: two, 4: four}.get(size, pool).run(prove_plan, name, PLANS[plan], tmp_path)[0]
    assert proof["equal"], proof["first_difference"]
    assert proof["max_relative_error"] <= 1e-9


# The loss of routers is one of the whole global batch, under each plan that does not cut it into microbatches.
BALANCED = [
    f"{name}: {plan}"
    for name in ("balanced mixtral", "balanced qwen3")
    for plan in (
        "R2",
        "R2E2 once",
        "S2E2 once",
        "T2",
        "R4E2",
        "R2S2E2",
        "R2T2E2",
        "S2T2E2 sequence",
        "S2 full",
        "C2",
        "S2C2E2",
    )
]
PLANS_OF_BALANCED: dict[str, dict[str, Any]] = {
    **PLANS,
    "R2": {"axes": {"replicate": 2}},
    "S2 full": {"axes": {"shard": 2}, "memory": {"recompute": "full"}},
    "T2": {"axes": {"tensor": 2}},
    "C2": {"axes": {"context": 2}},
    "S2C2E2": {"axes": {"shard": 2, "context": 2, "expert": 2}},
    "R2E2 once": {"axes": {"replicate": 2, "expert": 2}},
    "S2E2 once": {"axes": {"shard": 2, "expert": 2}},
}


@pytest.mark.parametrize("case", all_but({"balanced mixtral: R2E2 once"}, BALANCED))
def test_losses_of_routers_are_those_of_the_global_batch(
    two: RankPool, four: RankPool, case: str, tmp_path: Path
) -> None:
    name, plan = case.split(": ")
    size = Plan.model_validate(PLANS_OF_BALANCED[plan]).world_size
    proof = {2: two, 4: four}[size].run(prove_plan, name, PLANS_OF_BALANCED[plan], tmp_path)[0]
    assert proof["equal"], proof["first_difference"]
    assert proof["max_relative_error"] <= 1e-9


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["R2E2", "S2E2", "R4E4", "S4E2", "R2T2E2", "R2P2E2", "R2S2E2"])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_also_proved_with_their_grouped_product_in_fp32(
    two: RankPool, four: RankPool, name: str, plan: str, tmp_path: Path
) -> None:
    proof = {2: two, 4: four}[world_size(plan)].run(prove_plan, name, PLANS[plan], tmp_path, "fp32")[0]
    assert proof["equal"], proof["first_difference"]
    assert not any("eager" in note for note in proof["notes"])
