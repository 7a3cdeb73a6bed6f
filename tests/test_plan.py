"""A plan is validated when it is constructed, prints as one line, and survives a round trip through YAML."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from meshwright.errors import InputError
from meshwright.job import load_plan
from meshwright.plan import Plan
from meshwright.plan_fields.effects import NUMERICS, Numerics

SIZES = st.integers(1, 8)
PLANS = st.fixed_dictionaries(
    {
        "axes": st.fixed_dictionaries(dict.fromkeys(("replicate", "shard", "context", "tensor", "pipeline"), SIZES)),
        "modules": st.fixed_dictionaries(
            {
                "splits": st.dictionaries(st.sampled_from(["fc1", "blocks.*.up"]), st.just({"kind": "column"})),
                "sequence": st.booleans(),
                "loss": st.booleans(),
            }
        ),
        "pipeline": st.fixed_dictionaries({"schedule": st.sampled_from(["gpipe", "1f1b"]), "microbatches": SIZES}),
        "memory": st.fixed_dictionaries(
            {
                "sharding": st.sampled_from(["optimizer", "gradients", "parameters"]),
                "recompute": st.sampled_from(["none", "selective", "full"]),
                "accumulation": SIZES,
            }
        ),
        "numerics": st.fixed_dictionaries({"precision": st.sampled_from(["fp32", "tf32", "bf16", "fp16"])}),
        "gradients": st.fixed_dictionaries({"bucket_bytes": st.integers(1, 2**40)}),
        "compute": st.fixed_dictionaries(
            {"layout": st.sampled_from(["contiguous", "channels_last"]), "threads": st.none() | SIZES}
        ),
    }
).map(Plan.model_validate)


@given(PLANS)
def test_a_plan_is_read_back_unchanged_from_its_file(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    file = tmp_path_factory.mktemp("plan") / "plan.yaml"
    plan.save(file)
    assert load_plan(file) == plan


@given(PLANS)
def test_the_product_of_the_axes_is_the_number_of_ranks(plan: Plan) -> None:
    axes = plan.axes
    assert plan.world_size == axes.replicate * axes.shard * axes.context * axes.tensor * axes.pipeline


@pytest.mark.parametrize(
    ("groups", "line"),
    [
        ({}, "one rank · fp32"),
        ({"axes": {"replicate": 4, "tensor": 2}, "numerics": {"precision": "bf16"}}, "replicate 4 × tensor 2 · bf16"),
        ({"memory": {"accumulation": 2}}, "one rank · fp32 · accumulate 2"),
        ({"axes": {"shard": 4, "context": 2, "expert": 2}}, "shard 4 × context 2 · fp32 · experts over 2"),
        (
            {"axes": {"pipeline": 2, "shard": 2}, "pipeline": {"microbatches": 8}, "memory": {"sharding": "gradients"}},
            "shard 2 × pipeline 2 · fp32 · 1f1b/8 · shard gradients",
        ),
        (
            {"modules": {"splits": {"fc": {"kind": "row", "axis": "replicate"}}}, "memory": {"recompute": "full"}},
            "one rank · fp32 · wide layers split · recompute full",
        ),
        ({"compute": {"layout": "channels_last"}}, "one rank · fp32 · channels_last"),
        ({"compute": {"convolutions": "nnpack"}}, "one rank · fp32 · NNPACK convolutions"),
        ({"axes": {"replicate": 2}, "shares": [86, 42]}, "replicate 2 · fp32 · shares 86, 42"),
        ({"axes": {"replicate": 2}, "shares": "adaptive"}, "replicate 2 · fp32 · adaptive shares"),
        (
            {"axes": {"replicate": 16}, "shares": {"samples": [48] * 8 + [16] * 8, "adaptive": True}},
            "replicate 16 · fp32 · shares 48 × 8, 16 × 8 · adaptive shares",
        ),
    ],
)
def test_a_plan_prints_as_one_line(groups: dict[str, Any], line: str) -> None:
    assert Plan.model_validate(groups).summary() == line


def test_every_field_is_marked_with_its_effect_on_the_numbers() -> None:
    def leaves(kind: type[BaseModel]) -> list[Any]:
        fields: list[Any] = []
        for field in kind.model_fields.values():
            inner = field.annotation
            fields += leaves(inner) if isinstance(inner, type) and issubclass(inner, BaseModel) else [field]
        return fields

    marks = [field.json_schema_extra["numerics"] for field in leaves(Plan)]
    assert len(marks) >= 8
    assert set(marks) <= {"same", "rounding", "changes"}


@pytest.mark.parametrize(
    ("groups", "effect"),
    [
        ({}, "same"),
        ({"axes": {"replicate": 2}, "memory": {"recompute": "full"}}, "same"),
        ({"axes": {"tensor": 2}, "modules": {"splits": {"head": {"kind": "column"}}}}, "same"),
        ({"compute": {"layout": "channels_last"}}, "rounding"),
        ({"compute": {"convolutions": "nnpack"}}, "rounding"),
        ({"axes": {"replicate": 2}, "compute": {"fused_optimizer": True}}, "rounding"),
        ({"compute": {"compile": "model", "cuda_graphs": True}}, "rounding"),
        ({"numerics": {"precision": "bf16"}}, "changes"),
        ({"compute": {"fused_optimizer": True}, "gradients": {"precision": "bf16"}}, "changes"),
    ],
)
def test_a_plan_stays_within_the_largest_effect_of_its_fields(groups: dict[str, Any], effect: Numerics) -> None:
    plan = Plan.model_validate(groups)
    assert [allow for allow in NUMERICS if plan.stays_within(allow)] == list(NUMERICS[NUMERICS.index(effect) :])


def test_the_short_forms_of_shares_are_read_as_their_fields() -> None:
    axes = {"axes": {"replicate": 2, "shard": 2}}
    fixed = Plan.model_validate({**axes, "shares": [4, 3, 2, 1]})
    assert fixed.shares.model_dump() == {"samples": (4, 3, 2, 1), "adaptive": False, "shards": ()}
    assert Plan.model_validate({**axes, "shares": {"samples": [4, 3, 2, 1]}}) == fixed
    adaptive = Plan.model_validate({**axes, "shares": "adaptive"}).shares
    assert (adaptive.samples, adaptive.adaptive, adaptive.shards) == ((), True, ())


def test_proportions_of_shards_without_a_common_factor() -> None:
    plan = Plan.model_validate({"axes": {"shard": 4}, "shares": {"shards": [4, 4, 2, 2]}})
    assert plan.shares.uneven_shards == (2, 2, 1, 1)
    assert (plan.shard_part(), plan.shard_part(3), plan.shard_padding) == (1 / 3, 1 / 6, 4 / 3)
    even = Plan.model_validate({"axes": {"shard": 4}, "shares": {"shards": [3, 3, 3, 3]}})
    assert (even.shares.uneven_shards, even.shard_padding) == ((), 1.0)


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Plan().axes.replicate = 2


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"axis": {}}, "plan.axis is not a field: did you mean 'axes'?"),
        ({"axes": {"replica": 2}}, "plan.axes.replica is not a field: did you mean 'replicate'?"),
        ({"axes": {"replicate": 0}}, "plan.axes.replicate is 0: input should be greater than 0"),
        ({"numerics": {"precision": "fp12"}}, "plan.numerics.precision is 'fp12'"),
        (
            {"axes": {"pipeline": 2}, "pipeline": {"cuts": ["a", "b"]}},
            "2 cuts make 3 stages, which 2 pipeline ranks do not divide",
        ),
        (
            {"axes": {"pipeline": 2}, "pipeline": {"cuts": ["a", "b", "c"]}},
            "1f1b runs 1 stage per rank, but 3 cuts make 4 stages for 2 ranks: choose cuts that make 2 stages",
        ),
        (
            {"axes": {"replicate": 2, "shard": 3, "expert": 4}},
            "axes.expert is 4, which does not divide replicate(2) × shard(3) = 6 ranks",
        ),
        (
            {"axes": {"replicate": 2, "shard": 2}, "shares": [2, 1]},
            "shares.samples has 2 numbers, but replicate(2) × shard(2) = 4 ranks train on different samples",
        ),
        ({"axes": {"replicate": 2}, "shares": "adaptiv"}, "'adaptiv' is no division of a batch: write adaptive"),
        ({"axes": {"replicate": 2}, "shares": 47}, "47 is no division of a batch: write adaptive, or samples by data"),
        ({"axes": {"replicate": 2}, "shares": [2, 0]}, "plan.shares.samples.1 is 0: input should be greater than 0"),
        (
            {"axes": {"shard": 2}, "shares": {"shards": [2, 1, 1]}},
            "shares.shards is [2, 1, 1], 3 numbers, but axes.shard is 2: give one number for each rank",
        ),
        ({"shares": {"shards": [2]}}, "shares.shards is [2], 1 number, but axes.shard is 1: set it above 1, or leave"),
        (
            {"axes": {"shard": 2}, "shares": {"shards": [2, 0]}},
            "plan.shares.shards.1 is 0: input should be",
        ),
        (
            {"axes": {"shard": 2, "context": 2}, "shares": {"shards": [2, 1]}},
            "shares.shards is [2, 1], but axes.context is 2, with which shards are divided evenly only",
        ),
        (
            {"axes": {"shard": 2, "expert": 2}, "shares": {"shards": [2, 1]}},
            "shares.shards is [2, 1], but axes.expert is 2, with which shards are divided evenly only",
        ),
        (
            {"axes": {"shard": 2}, "memory": {"offload": "optimizer"}, "shares": {"shards": [2, 1]}},
            "but memory.offload is optimizer, with which shards are divided evenly only: set memory.offload to none",
        ),
        (
            {"axes": {"shard": 2}, "numerics": {"precision": "fp8"}, "shares": {"shards": [2, 1]}},
            "but numerics.precision is fp8, with which shards are divided evenly only: set numerics.precision to bf16",
        ),
        (7, "plan is 7: write 'auto', a file, or the plan's groups"),
    ],
)
def test_a_wrong_plan_is_refused_in_one_line(groups: Any, message: str) -> None:
    with pytest.raises(InputError) as refusal:
        load_plan(groups)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_wrong_plan_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.yaml: there is no such plan file"):
        load_plan(tmp_path / "nowhere.yaml")
    file = tmp_path / "plan.yaml"
    file.write_text("- replicate\n")
    with pytest.raises(InputError, match=r"plan\.yaml: a plan file is a YAML mapping, this one is list"):
        load_plan(file)


def test_every_field_is_documented_with_its_numerics_mark() -> None:
    documentation = Path(__file__).parent.parent.joinpath("docs", "job.md").read_text()
    for group, field in Plan.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, BaseModel)
        for name, choice in field.annotation.model_fields.items():
            assert isinstance(choice.json_schema_extra, dict)
            (line,) = [line for line in documentation.splitlines() if line.startswith(f"| `{group}.{name}` |")]
            assert line.split(" | ")[2] == choice.json_schema_extra["numerics"], line


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"axes": {"shard": 2}, "gradients": {"servers": 1}},
            "gradients.servers is 1, which works with the replicate axis",
        ),
        ({"axes": {"tensor": 2}, "gradients": {"local_steps": 4}}, "gradients.local_steps is 4"),
        ({"axes": {"context": 2}, "gradients": {"local_steps": 4}}, "gradients.local_steps is 4"),
        ({"axes": {"replicate": 2, "expert": 2}, "gradients": {"powersgd_rank": 4}}, "gradients.powersgd_rank is 4"),
        ({"gradients": {"servers": 1, "powersgd_rank": 2}}, "exclude each other"),
        ({"gradients": {"powersgd_rank": 2, "precision": "bf16"}}, "gradients.precision is bf16"),
        ({"gradients": {"updates": "asynchronous"}}, "set gradients.servers"),
        ({"gradients": {"algorithm": "ring", "servers": 1}}, "algorithm is ring.*gradients.servers"),
        ({"gradients": {"algorithm": "tree", "local_steps": 2}}, "algorithm is tree.*gradients.local_steps"),
        ({"axes": {"shard": 2}, "gradients": {"algorithm": "ring"}}, "algorithm is ring.*axes.shard .2."),
    ],
)
def test_incompatible_ways_of_combining_gradients_are_refused(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Plan.model_validate(plan)


def test_the_way_gradients_are_combined_is_part_of_the_summary() -> None:
    plan = Plan.model_validate({"axes": {"replicate": 3}, "gradients": {"servers": 2, "updates": "bounded"}})
    assert plan.summary() == "replicate 3 · fp32 · 2 bounded 2 servers"
    assert (plan.world_size, plan.processes) == (3, 5)
    local = Plan.model_validate({"axes": {"replicate": 3}, "gradients": {"algorithm": "native", "local_steps": 8}})
    assert local.summary() == "replicate 3 · fp32 · native · 8 local steps"
