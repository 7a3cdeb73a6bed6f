"""Every published row is a case or has a reason, and rows of known runs are read correctly."""

from collections import Counter
from functools import cache

import pytest

from meshwright.cluster.names import cluster_from_name
from validation.runs.case import PublishedCase
from validation.runs.cover import Coverage, cover
from validation.runs.features import feature_of
from validation.runs.rows import origins, rows


@cache
def coverage() -> Coverage:
    return cover()


@cache
def cases() -> dict[str, PublishedCase]:
    return {case.id: case for case in coverage().cases}


def test_every_row_is_a_case_or_has_a_reason() -> None:
    covered, reasons = set(cases()), coverage().reasons
    ids = [row.id for row in rows()]
    assert len(ids) == len(set(ids))
    assert covered | set(reasons) == set(ids)
    assert not covered & set(reasons)
    assert all(reason and "\n" not in reason for reason in reasons.values())


def test_every_row_has_an_origin() -> None:
    assert all("repo" in origins()[row.origin] for row in rows())


def test_every_source_with_a_stated_plan_has_cases() -> None:
    """No row of these sources may be lost to a reader, except for a reason that is known."""
    reasons = {(row_id.rpartition("-")[0], reason) for row_id, reason in coverage().reasons.items()}
    sources = ("vtrain_single", "vtrain_multi", "megatron_sc21_table1", "korthikanti22_table5", "bigscience_a100")
    for source in (*sources, "llm_foundry", "torchtitan_h100", "simumax_b200"):
        assert any(case.source == source for case in coverage().cases)
        assert not [reason for name, reason in reasons if name == source]


def test_a_case_has_a_step_time_or_was_out_of_memory() -> None:
    for case in coverage().cases:
        assert (case.step_s is None) == case.oom, case.id
        assert case.step_s is None or case.step_s > 0, case.id
    assert any(case.oom for case in coverage().cases)


def test_the_plan_fills_the_cluster_and_divides_the_batch() -> None:
    devices = {name: cluster_from_name(name).device_count for name in {case.cluster for case in coverage().cases}}
    for case in coverage().cases:
        assert case.plan.world_size == devices[case.cluster], case.id
        data = case.plan.axes.replicate * case.plan.axes.shard
        times = case.plan.pipeline.microbatches * case.plan.memory.accumulation
        assert case.global_batch == data * times * case.micro_batch, case.id


def test_cuts_lie_between_blocks() -> None:
    for case in coverage().cases:
        cuts, layers = case.plan.pipeline.cuts, case.model.arguments.get("layers", 10**6)
        places = [int(cut.removeprefix("blocks.")) for cut in cuts]
        assert places == sorted(set(places)), case.id
        assert all(place < layers - 1 for place in places), case.id
        assert bool(cuts) == (case.plan.axes.pipeline > 1), case.id


@pytest.mark.parametrize(
    ("row", "axes", "cluster", "layers"),
    [
        ("megatron_sc21_table1-0006", {"replicate": 32, "tensor": 8, "pipeline": 4}, "128x8xA100-80GB", 60),
        ("megatron_sc21_table1-0007", {"replicate": 24, "tensor": 8, "pipeline": 8}, "192x8xA100-80GB", 80),
    ],
)
def test_the_published_76b_and_145b_runs(row: str, axes: dict[str, int], cluster: str, layers: int) -> None:
    case = cases()[row]
    assert {name: size for name, size in case.plan.axes.model_dump().items() if size > 1} == axes
    assert case.cluster == f"{cluster}@InfiniBand-HDR"
    assert case.model.arguments["layers"] == layers
    assert case.plan.memory.recompute == "full"
    assert case.plan.pipeline.schedule == "interleaved_1f1b"
    assert any("stages a rank" in word for word in case.defaults)


def test_sharding_levels_come_from_the_words_for_them() -> None:
    assert cases()["bigscience_a100-0099"].plan.memory.sharding == "optimizer"
    assert cases()["bigscience_a100-0099"].plan.axes.shard == 8
    assert cases()["llm_foundry-0001"].plan.axes.shard == 512
    hybrid = cases()["fms_fsdp-0001"].plan
    assert (hybrid.axes.replicate, hybrid.axes.shard, hybrid.memory.sharding) == (16, 8, "parameters")


@pytest.mark.parametrize(
    ("row", "tokens_per_s", "cuts"),
    [("0024", 38894.51, ("blocks.9",)), ("0021", 36497.09, ("blocks.9",)), ("0017", 33677.07, ("blocks.9",))],
)
def test_nanotron_counts_every_parameter_and_cuts_by_cost(row: str, tokens_per_s: float, cuts: tuple[str, ...]) -> None:
    """Its table has tokens a second and GPU beside its MFU, and the parameters of a rank: ten blocks of sixteen."""
    case = cases()[f"nanotron_ultrascale-{row}"]
    assert case.step_s is not None
    tokens = case.global_batch * case.sample.size[0] / case.plan.world_size
    assert tokens / case.step_s == pytest.approx(tokens_per_s, rel=5e-4)
    assert case.plan.pipeline.cuts == cuts


def test_stages_that_count_embedding_and_head_are_read_as_blocks() -> None:
    cuts = cases()["sailor_clariden-0010"].plan.pipeline.cuts
    assert cuts == tuple(f"blocks.{last}" for last in (1, 6, 11, 16, 20, 24, 28))


def test_batches_of_all_gpus_together_are_divided_among_them() -> None:
    eight_ranks = [case for case in coverage().cases if case.source == "lambda_v1" and case.plan.world_size == 8]
    assert {case.micro_batch for case in eight_ranks if case.model.call.endswith("resnet50")} <= {
        96,
        128,
        256,
        320,
        496,
        640,
        928,
        1280,
    }


def test_accumulation_of_tensorflow_rows_makes_one_global_batch() -> None:
    half, single = cases()["nvidia_dle-0670"], cases()["nvidia_dle-0671"]
    assert (half.micro_batch, half.plan.memory.accumulation) == (16, 4096)
    assert (single.micro_batch, single.plan.memory.accumulation) == (8, 8192)
    assert half.global_batch == single.global_batch


def test_rows_that_are_out_of_scope_have_their_reason() -> None:
    reasons = coverage().reasons
    assert reasons["megatron_bridge-0031"].startswith("blocks of state-space models")
    assert reasons["megatron_bridge-0120"].startswith("blocks of state-space models")
    assert "fp4: a plan has no such precision" in reasons.values()
    assert reasons["nanogpt-0001"].startswith("batch not stated")


def test_layout_and_engine_are_those_of_the_program_of_each_lab() -> None:
    """NVIDIA's SSD uses channels-last images, which Lambda's older fork of it cannot; BERT has its own program."""
    assert cases()["nvidia_dle-0237"].plan.compute.layout == "channels_last"
    assert cases()["lambda_v2-0001"].plan.compute.layout == "contiguous"
    assert cases()["lambda_v1-0062"].engine == "nvidia-bert"
    assert cases()["nvidia_dle-0670"].engine == "tensorflow-bert"
    assert cases()["nvidia_dle-0091"].engine == "nvidia-examples"


def test_optimizers_went_from_tensor_to_tensor_before_torch_2() -> None:
    old, new = cases()["nvidia_dle-0091"].optimizer, cases()["lambda_v2-0616"].optimizer
    assert old is not None
    assert new is not None
    assert old.arguments["foreach"] is False
    assert "foreach" not in new.arguments


@pytest.mark.parametrize(
    ("row", "optimizer"),
    [
        ("lambda_v1-0613", "LineByLine"),  # fine-tuned in tf32: apex's fused Adam is for fp16
        ("lambda_v1-0503", "LineByLine"),  # fp32
        ("lambda_v2-0086", "AdamW"),  # fp16
        ("nvidia_dle-0309", "AdamW"),  # pre-trained in tf32
        ("nvidia_dle-0080", "AdamW"),  # fine-tuned in tf32, in Paddle
    ],
)
def test_bert_is_fine_tuned_in_fp32_with_nvidias_own_adam(row: str, optimizer: str) -> None:
    optimizer_call = cases()[row].optimizer
    assert optimizer_call is not None
    assert optimizer_call.call.endswith(f":{optimizer}")


def test_mixtures_context_fp8_and_racks_are_read() -> None:
    deepseek = cases()["megatron_bridge-0001"]
    assert deepseek.cluster == "4x64xGB300@InfiniBand-XDR"
    assert (deepseek.plan.axes.shard, deepseek.plan.axes.pipeline, deepseek.plan.axes.expert) == (128, 2, 32)
    assert (deepseek.precision, deepseek.plan.numerics.precision) == ("fp8", "fp8")
    assert deepseek.model.arguments["experts"] == 256
    llama = cases()["dgxc_h100_v25.02-0029"].plan
    assert (llama.axes.context, llama.axes.tensor, llama.axes.pipeline, llama.axes.shard) == (2, 8, 9, 8)
    assert llama.modules.attention_exchange == "ring"
    assert cases()["torchtitan_h100-0009"].plan.modules.attention_exchange == "all_gather"


def test_experts_over_tensor_ranks_are_read_as_divided_experts() -> None:
    case = cases()["megatron_bridge-0106"]  # 32 ranks for the experts, of which two are tensor ranks
    assert (case.plan.axes.tensor, case.plan.axes.shard, case.plan.axes.expert) == (2, 16, 16)
    assert any(default.startswith("experts over 16 data ranks") for default in case.defaults)


def test_most_rows_with_later_features_are_covered() -> None:
    """Of the rows that were left out for experts, context, fp8 and missing GPUs, more than two thirds have a case."""
    counts = Counter(feature_of(case) for case in coverage().cases)
    left_out = ("blocks of state-space", "fp4", "the catalog has no", "fewer blocks", "fine-tuning", "a model whose")
    others = sum(reason.startswith(left_out) for reason in coverage().reasons.values())
    covered = sum(count for feature, count in counts.items() if feature)
    assert counts["experts"] > 100
    assert covered > 2 * others
