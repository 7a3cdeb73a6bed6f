"""Every field of a plan can be fixed to another value than its default: the plan has it, or one line says why not. A
field that has no effect in the plan is named."""

from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_fields.constraints import FIELDS, make_constraints
from meshwright.planner.constraints.apply import check_constraints, constrained
from meshwright.planner.constraints.no_effect import without_effect
from meshwright.planner.explanation.constraint_cost import cost_sentences
from meshwright.planner.offload import search_with_offload
from meshwright.planner.profiles import Profiles
from tests.planner.constraints.test_constraints import inputs_of, layers, tiny_decoder

VALUES: dict[str, tuple[Any, ...]] = {
    **{f"axes.{axis}": (2, 4) for axis in ("replicate", "shard", "context", "tensor", "pipeline", "expert")},
    "modules.splits": ({"head": {"kind": "vocabulary"}}, {"nowhere": {"kind": "row"}}),
    "modules.sequence": (True,),
    "modules.loss": (True,),
    "modules.branches": ({"nowhere": 1},),
    "modules.attention_exchange": ("ring",),
    "pipeline.schedule": ("gpipe", "interleaved_1f1b", "zero_bubble", "zbv"),
    "pipeline.microbatches": (2, 3, 16),
    "pipeline.cuts": (["blocks.0"], ["nowhere"]),
    "memory.sharding": ("optimizer", "gradients"),
    "memory.recompute": ("selective", "full"),
    "memory.accumulation": (2, 3),
    "memory.offload": ("optimizer", "parameters"),
    "numerics.precision": ("tf32", "bf16", "fp16", "fp8"),
    "numerics.cast": ("weights",),
    "numerics.batch_norm": ("synchronized",),
    "gradients.algorithm": ("native", "ring", "tree", "halving_doubling", "two_level", "shared_memory"),
    "gradients.bucket_bytes": (1_000_000,),
    "gradients.precision": ("bf16", "fp16"),
    "gradients.powersgd_rank": (2,),
    "gradients.local_steps": (4,),
    "gradients.local_after": (3,),
    "gradients.servers": (1,),
    "gradients.updates": ("asynchronous", "bounded"),
    "gradients.staleness": (3,),
    "compute.layout": ("channels_last",),
    "compute.convolutions": ("nnpack",),
    "compute.compile": ("blocks", "model"),
    "compute.compile_mode": ("max-autotune",),
    "compute.cuda_graphs": (True,),
    "compute.fused_optimizer": (True,),
    "compute.loss_chunks": (4,),
    "compute.threads": (1,),
    "shares.samples": ([10, 6], [4, 4, 4, 4]),
    "shares.adaptive": (True,),
    "shares.shards": ([3, 1],),
}
CASES = [(name, value) for name, values in VALUES.items() for value in values]
QUICK = [
    ("modules.attention_exchange", "ring", "no context axis"),
    ("gradients.local_after", 3, "no local steps"),
    ("gradients.servers", 1, "not predicted"),
    ("compute.cuda_graphs", True, "has no GPUs"),
    ("numerics.precision", "tf32", "has no instructions for it"),
]


def outcome(name: str, value: Any, cluster: str, profiles: Profiles) -> str:
    """Returns what is said about a plan with this field, which is checked to have it, or the refusal."""
    constraints = make_constraints({name: value})
    try:
        best = search_with_offload(constrained(inputs_of(cluster), constraints), profiles).ranked[0]
    except InputError as error:
        return f"refused: {error}"
    check_constraints(best.plan, constraints)
    return " ".join(cost_sentences(constraints, best, best)[1:])


def test_no_field_is_left_out() -> None:
    assert set(VALUES) == set(FIELDS)


@pytest.mark.parametrize(("name", "value", "words"), QUICK)
def test_fixed_fields_are_kept_or_refused(name: str, value: Any, words: str) -> None:
    assert words in outcome(name, value, "2xEPYC-7763", layers())


@pytest.mark.soak
@pytest.mark.parametrize(("cluster", "is_decoder"), [("4xA100-80GB", True), ("4xEPYC-7763", False)])
def test_every_field_is_kept_or_refused(cluster: str, is_decoder: bool) -> None:
    for name, value in CASES:
        words = outcome(name, value, cluster, tiny_decoder() if is_decoder else layers())
        is_named = not words.startswith("refused: ") or name.partition(".")[2] in words
        assert is_named, f"{name}={value}: {words}"
        assert "\n" not in words


@pytest.mark.parametrize(
    ("fix", "plan", "has_effect"),
    [
        ({"modules.sequence": True}, {"axes": {"replicate": 4}}, False),
        ({"modules.sequence": True}, {"axes": {"tensor": 4}}, True),
        ({"modules.splits": {"0": {"kind": "row", "axis": "replicate"}}}, {"axes": {"replicate": 4}}, True),
        ({"gradients.bucket_bytes": 10**6}, {"axes": {"shard": 4}}, False),
        ({"gradients.precision": "bf16"}, {"axes": {"shard": 4}}, True),
        ({"compute.compile_mode": "max-autotune"}, {"compute": {"compile": "blocks"}}, True),
        ({"compute.compile_mode": "max-autotune"}, {}, False),
        ({"compute.compile_mode": "default"}, {}, True),
        ({"memory.sharding": "optimizer"}, {"axes": {"replicate": 4}}, False),
    ],
)
def test_fields_without_effect_are_named(fix: dict[str, Any], plan: dict[str, Any], has_effect: bool) -> None:
    constraints = make_constraints(fix)
    for name, value in fix.items():
        group, field = name.split(".")
        plan = {**plan, group: {**plan.get(group, {}), field: value}}
    named = without_effect(Plan.model_validate(plan), constraints)
    assert list(named) == ([] if has_effect else list(fix))
