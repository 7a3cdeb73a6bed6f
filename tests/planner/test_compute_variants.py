"""How a rank runs its operators: the fastest variant that can run and that fits, and no variant that gains nothing."""

import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.parallel.compiled import compile_model
from meshwright.plan import Plan
from meshwright.plan_fields.effects import Numerics
from meshwright.plan_fields.groups import MIB
from meshwright.plan_rules.table import check_rules
from meshwright.planner.compute_variants import ModelTraits, best_variant, plan_that_fits, variants_to_time
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.simulator.predict import Prediction, predict_plan
from meshwright.workloads.text.decoder import Decoder, NextTokenLoss
from tests.auto.machines import cpu_cluster
from tests.planner.cases import MOMENTUM, one_layer, predict_as, search_plans, small_decoder

H100 = PlanningInputs(find_cluster("8xH100"), 8, MOMENTUM, allow="rounding", can_fuse_optimizer=True)
# Seconds of a step that each choice saves, in a step of one second.
GAINS = {
    "layout channels_last": 0.02,
    "fused_optimizer True": 0.05,
    "compile blocks": 0.1,
    "compile model": 0.2,
    "cuda_graphs True": 0.3,
}


@cache
def plain_prediction() -> Prediction:
    profile = one_layer().get("fp32", "none")
    return replace(predict_plan(find_cluster("8xH100"), profile, Plan(), 8, MOMENTUM), step_s=1.0)


def predict(plan: Plan, gains: dict[str, float] = GAINS, too_large: str = "") -> Prediction:
    """Returns a prediction in which each choice of the plan saves its gain, and `too_large` needs too much memory."""
    chosen = {f"{name} {value}" for name, value in plan.compute}
    prediction = replace(plain_prediction(), step_s=1 - sum(gain for name, gain in gains.items() if name in chosen))
    if too_large not in chosen:
        return prediction
    return replace(prediction, memory=replace(prediction.memory, device_bytes=2**40))


def choose(
    groups: dict[str, Any],
    inputs: PlanningInputs = H100,
    *,
    images: bool = False,
    blocks: bool = True,
    tokens: float = 0.0,
    **options: Any,
) -> dict[str, Any]:
    """Returns the chosen `compute` fields that differ from their defaults."""
    plan, prediction = best_variant(
        Plan.model_validate(groups),
        plain_prediction(),
        inputs,
        lambda plan: predict(plan, **options),
        ModelTraits(images, blocks, tokens),
    )
    assert prediction.step_s == predict(plan, **options).step_s
    assert plan.stays_within(inputs.allow if plan.numerics.precision == "fp32" else "changes")
    check_rules(plan)
    return plan.compute.model_dump(exclude_defaults=True)


FUSED = {"fused_optimizer": True}
MODEL = {**FUSED, "compile": "model", "cuda_graphs": True}
BLOCKS = {**FUSED, "compile": "blocks", "cuda_graphs": True}


@pytest.mark.parametrize(
    ("groups", "chosen"),
    [
        ({}, MODEL),
        ({"axes": {"replicate": 8}}, MODEL),
        ({"axes": {"shard": 8}}, BLOCKS),
        ({"axes": {"tensor": 8}}, {**FUSED, "compile": "blocks"}),
        ({"axes": {"tensor": 8}, "memory": {"recompute": "full"}}, {**FUSED, "compile": "blocks"}),
        ({"axes": {"tensor": 8}, "memory": {"recompute": "selective"}}, FUSED),
        ({"axes": {"pipeline": 2}}, {**FUSED, "compile": "model"}),
        ({"axes": {"pipeline": 2, "shard": 2}}, {**FUSED, "compile": "blocks"}),
        ({"axes": {"replicate": 8}, "modules": {"splits": {"a": {"kind": "column", "axis": "replicate"}}}}, FUSED),
    ],
)
def test_the_fastest_variant_that_can_run_is_chosen(groups: dict[str, Any], chosen: dict[str, Any]) -> None:
    assert choose(groups) == chosen
    plan = Plan.model_validate({**groups, "compute": {"compile": "model"}})
    with warnings.catch_warnings(record=True) as refusals:
        warnings.simplefilter("always")
        compile_model(nn.Sequential(nn.Sequential(nn.Linear(1, 1))), plan, torch.device("cpu"))
    compiles = not any("not compiled" in str(refusal.message) for refusal in refusals)
    assert compiles == ("compile" in chosen), "the planner compiles where the executor does"


def test_cuda_graphs_alone_are_for_a_single_rank() -> None:
    gains = {"cuda_graphs True": 0.3}
    assert choose({}, gains=gains) == {"cuda_graphs": True}
    assert choose({"axes": {"replicate": 8}}, gains=gains) == {"compile": "blocks", "cuda_graphs": True}
    assert choose({"axes": {"tensor": 8}}, gains=gains) == {}


def test_a_simpler_variant_is_preferred_if_it_is_almost_as_fast() -> None:
    assert choose({}, gains={"compile blocks": 0.2, "compile model": 0.205}) == {"compile": "blocks"}
    assert choose({}, gains={"compile blocks": 0.2, "compile model": 0.25}) == {"compile": "model"}
    assert choose({}, gains={"fused_optimizer True": 0.009, "compile model": 0.009, "cuda_graphs True": -1}) == {}


def test_a_model_without_blocks_is_compiled_as_a_whole() -> None:
    assert choose({"axes": {"tensor": 8}}, blocks=False) == FUSED, "only blocks of split layers are compiled"
    assert choose({}, blocks=False, gains={"compile blocks": 0.2, "compile model": 0.2}) == {"compile": "model"}
    assert choose({"axes": {"shard": 8}}, blocks=False, gains={"compile blocks": 0.2}) == {"compile": "blocks"}


def test_a_variant_that_does_not_fit_is_not_chosen() -> None:
    assert choose({}, too_large="cuda_graphs True") == {**FUSED, "compile": "model"}


def test_images_in_fp32_get_the_layout_that_is_predicted_to_be_faster() -> None:
    assert choose({}, images=True)["layout"] == "channels_last"
    assert "layout" not in choose({}, images=True, gains={"layout channels_last": 0.005})
    assert "layout" not in choose({"numerics": {"precision": "bf16"}}, images=True)


def test_cpu_ranks_get_the_kernels_of_convolutions_that_are_predicted_to_be_faster() -> None:
    cpus, gains = PlanningInputs(cpu_cluster(2), 8, MOMENTUM, allow="rounding"), {"layout channels_last": 0.1}
    assert choose({}, cpus, images=True, gains={**gains, "convolutions nnpack": 0.2}) == {"convolutions": "nnpack"}
    assert choose({}, cpus, images=True, gains={**gains, "convolutions nnpack": 0.05}) == {"layout": "channels_last"}
    assert choose({}, cpus, images=False, gains={"convolutions nnpack": 0.2}) == {}
    assert choose({}, images=True, gains={"convolutions nnpack": 0.2}) == {}
    assert choose({}, replace(cpus, allow="same"), images=True, gains={"convolutions nnpack": 0.2}) == {}


@pytest.mark.parametrize(
    ("inputs", "chosen"),
    [
        (replace(H100, allow="same"), {}),
        (replace(H100, can_fuse_optimizer=False), {"compile": "model", "cuda_graphs": True}),
        (PlanningInputs(cpu_cluster(2), 8, MOMENTUM, allow="rounding"), {"layout": "channels_last"}),
    ],
)
def test_what_may_not_change_and_what_the_device_lacks_is_not_chosen(
    inputs: PlanningInputs, chosen: dict[str, Any]
) -> None:
    assert choose({}, inputs, images=inputs.cluster.kind == "cpu" or inputs.allow == "same") == chosen


def test_what_the_executor_refuses_is_not_chosen() -> None:
    def check_plan(plan: Plan) -> None:
        if plan.compute.compile != "none":
            raise InputError("the model takes derivatives in its forward pass")

    assert choose({}, replace(H100, check_plan=check_plan)) == {**FUSED, "cuda_graphs": True}


@pytest.mark.parametrize("allow", ["same", "rounding", "changes"])
def test_the_search_ranks_plans_with_their_best_variants(monkeypatch: pytest.MonkeyPatch, allow: Numerics) -> None:
    """The replicas of the toy are slower than the shards, until whole models are compiled."""

    def predict_toy(*arguments: Any, **_: Any) -> Prediction:
        plan: Plan = arguments[2]
        replicated_s = 0.5 if plan.compute.compile == "model" else 1.0
        return replace(plain_prediction(), step_s=0.9 if plan.axes.shard > 1 else replicated_s)

    predict_as(monkeypatch, predict_toy)
    _, result = search_plans("2xH100", one_layer(), 8, allow=allow)
    best = result.ranked[0]
    if allow == "same":
        assert best.plan.axes.shard == 2
    else:
        assert (best.plan.axes.replicate, best.plan.compute.compile, best.prediction.step_s) == (2, "model", 0.5)
        assert best in result.family_bests
    assert all(priced.plan.stays_within(allow) for priced in result.ranked)


# ---- how gradients and weights are sent

BF16_SHARDS = {"axes": {"shard": 8}, "numerics": {"precision": "bf16"}}


def predict_exchange(plan: Plan) -> Prediction:
    """Returns a prediction in which smaller buckets and weights in bf16 are faster."""
    gain = 0.1 * (plan.numerics.cast == "weights") + 0.05 * (plan.gradients.bucket_bytes == 5 * MIB)
    return replace(plain_prediction(), step_s=1 - gain)


@pytest.mark.parametrize(
    ("groups", "allow", "cast", "bucket_mib"),
    [
        ({"axes": {"replicate": 8}}, "same", "operators", 5),
        ({"axes": {"replicate": 4, "tensor": 2}}, "rounding", "operators", 5),
        ({"axes": {"tensor": 8}}, "changes", "operators", 25),
        (BF16_SHARDS, "changes", "weights", 25),
        (BF16_SHARDS, "rounding", "operators", 25),
        ({"axes": {"shard": 8}}, "changes", "operators", 25),
    ],
)
def test_buckets_and_casts_of_weights_are_chosen_where_they_are_faster(
    groups: dict[str, Any], allow: Numerics, cast: str, bucket_mib: int
) -> None:
    inputs = replace(H100, allow=allow)
    plan, _ = best_variant(
        Plan.model_validate(groups), plain_prediction(), inputs, predict_exchange, ModelTraits(blocks=False)
    )
    assert (plan.numerics.cast, plan.gradients.bucket_bytes) == (cast, bucket_mib * MIB)
    check_rules(plan)


def test_weights_that_are_gathered_in_bf16_take_half_the_bytes_and_no_casts() -> None:
    profile = small_decoder().get("bf16", "none")
    plan = Plan.model_validate(BF16_SHARDS)
    cast = plan.model_copy(update={"numerics": plan.numerics.model_copy(update={"cast": "weights"})})
    slow_links = find_cluster("8xA100-80GB@Ethernet-10G")
    before, after = (predict_plan(slow_links, profile, p, 8, MOMENTUM).breakdown for p in (plan, cast))
    assert after["shard"] < 0.8 * before["shard"]
    assert after["compute"] < before["compute"]
    assert (after["optimizer"], after["bubble"]) == (before["optimizer"], before["bubble"])


# ---- a loss in chunks

TOKENS = 1024  # of a sample; 8 samples
CHUNKS = {**GAINS, "loss_chunks 2": 0.03, "loss_chunks 8": 0.05}


def test_a_loss_in_chunks_is_chosen_where_it_is_faster() -> None:
    assert choose({}, tokens=TOKENS, gains=CHUNKS) == {**MODEL, "loss_chunks": 8}
    assert choose({}, tokens=TOKENS, gains={**CHUNKS, "loss_chunks 8": 0.03}) == {**MODEL, "loss_chunks": 2}
    assert choose({}, tokens=TOKENS) == MODEL
    assert choose({}, gains=CHUNKS) == MODEL
    assert choose({"axes": {"tensor": 8}}, tokens=TOKENS, gains=CHUNKS) == {**FUSED, "compile": "blocks"}
    assert choose({}, replace(H100, allow="same"), tokens=TOKENS, gains=CHUNKS) == {}


def test_chunks_are_left_out_where_compiled_code_fits_without_them_and_is_faster() -> None:
    in_chunks = {"compute": {"loss_chunks": 8}}
    gains = {**GAINS, "loss_chunks 1": 0.2}
    assert choose(in_chunks, tokens=TOKENS, gains=gains) == MODEL
    assert choose(in_chunks, tokens=TOKENS, gains=gains, too_large="loss_chunks 1") == {**MODEL, "loss_chunks": 8}


@cache
def long_texts() -> Profiles:
    """The scores of one sample need more memory than a GPU has."""
    with torch.device("meta"):
        model = Decoder(layers=1, hidden=64, heads=4, sequence=2**16, vocabulary=400_000, tied=False)
        tokens = torch.empty(2, 2**16, dtype=torch.long)
    return Profiles(model, (tokens, tokens), NextTokenLoss())


def test_a_plan_that_only_fits_with_a_loss_in_chunks_has_the_fewest_chunks() -> None:
    inputs = replace(H100, cluster=find_cluster("1xH100"), global_batch=1)
    profile = long_texts().get("fp32", "none")
    predictions: list[Plan] = []

    def predict(plan: Plan) -> Prediction:
        predictions.append(plan)
        return predict_plan(inputs.cluster, profile, plan, 1, MOMENTUM)

    plan, prediction = plan_that_fits(Plan(), inputs, predict, profile)
    assert (plan.compute.loss_chunks, len(predictions)) == (16, 2)
    assert prediction.memory.device_bytes <= inputs.capacity_bytes < predict(Plan()).memory.device_bytes
    assert plan_that_fits(Plan(), replace(inputs, allow="same"), predict, profile)[0] == Plan()


def test_the_search_finds_plans_that_only_fit_with_a_loss_in_chunks() -> None:
    _, result = search_plans("1xH100", long_texts(), 1, allow="rounding")
    assert result.ranked[0].plan.compute.loss_chunks > 1
    with pytest.raises(InputError, match="fits no plan"):
        search_plans("1xH100", long_texts(), 1, allow="same")


# ---- variants that are timed


def timed(
    groups: dict[str, Any], inputs: PlanningInputs = H100, *, images: bool = False, **options: Any
) -> list[tuple[dict[str, Any], float | None]]:
    """Returns the `compute` fields of the variants that differ from their defaults, and the predicted seconds."""
    plan = Plan.model_validate(groups)
    variants = variants_to_time(plan, inputs, lambda plan: predict(plan, **options), ModelTraits(images, True, 0.0))
    for variant, _ in variants:
        check_rules(variant)
        assert variant.model_copy(update={"compute": plan.compute}) == plan
    return [(plan.compute.model_dump(exclude_defaults=True), step_s) for plan, step_s in variants]


def test_eager_steps_and_the_compiled_model_are_always_timed_the_eager_ones_first() -> None:
    chosen = {"compute": BLOCKS}
    variants = timed(chosen)
    assert [compute for compute, _ in variants[:4]] == [
        FUSED,
        {**FUSED, "cuda_graphs": True},
        {**FUSED, "compile": "model"},
        MODEL,
    ], "CUDA graphs take no second compilation"
    assert variants[4][0] == BLOCKS
    predicted_s = [step_s for compute, step_s in variants if "cuda_graphs" not in compute]
    assert predicted_s[:2] == [0.95, 0.75]
    assert [compute for compute, _ in timed({})][:2] == [{}, FUSED], "a fused optimizer is also tried"


def test_what_is_predicted_to_be_much_slower_is_not_timed() -> None:
    gains = {**GAINS, "compile model": 0.3}
    computes = [compute for compute, _ in timed({"compute": MODEL}, gains=gains)]
    assert computes == [FUSED, {**FUSED, "cuda_graphs": True}, {**FUSED, "compile": "model"}, MODEL]


def test_the_plan_that_the_search_has_found_is_always_timed() -> None:
    slow = {**FUSED, "compile": "blocks"}
    assert slow in [compute for compute, _ in timed({"compute": slow})]


def test_several_layouts_of_images_are_timed_in_eager_steps() -> None:
    computes = [compute for compute, _ in timed({"compute": {"layout": "channels_last"}}, images=True)]
    assert computes[:3] == [{"layout": "channels_last"}, {}, {"layout": "channels_last", **FUSED}]
    bf16 = {"numerics": {"precision": "bf16"}, "compute": {"layout": "channels_last"}}
    computes = [compute for compute, _ in timed(bf16, replace(H100, allow="changes"), images=True)]
    assert all(compute["layout"] == "channels_last" for compute in computes)


def test_compiling_for_cpus_is_timed_without_a_prediction() -> None:
    inputs = replace(H100, cluster=cpu_cluster(2), can_fuse_optimizer=False)
    computes = timed({"compute": {"convolutions": "nnpack"}}, inputs, images=True)
    assert computes == [
        ({"convolutions": "nnpack"}, 1.0),
        ({}, 1.0),
        ({"layout": "channels_last"}, 0.98),
        ({"convolutions": "nnpack", **FUSED}, 0.95),
        ({"compile": "model"}, None),
    ]


def test_variants_keep_what_plans_may_change_and_fit() -> None:
    assert timed({}, replace(H100, allow="same")) == []
    computes = [compute for compute, _ in timed({"compute": MODEL}, too_large="compile none")]
    assert computes == [{**FUSED, "compile": "model"}, MODEL, BLOCKS]

    def refuse(plan: Plan) -> None:
        if plan.compute.compile != "none":
            raise InputError("compiling is avoided")

    computes = [compute for compute, _ in timed({}, replace(H100, check_plan=refuse))]
    assert computes == [{}, FUSED, {"cuda_graphs": True}, {**FUSED, "cuda_graphs": True}]


def test_models_that_cannot_be_compiled_as_a_whole_have_their_blocks_compiled() -> None:
    computes = [compute.get("compile") for compute, _ in timed({"axes": {"shard": 8}})]
    assert "model" not in computes
    assert "blocks" in computes
