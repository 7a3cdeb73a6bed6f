"""The winner is the fastest plan that fits, for reasons that follow the hardware."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.numbers.units import bytes_text
from meshwright.plan import Plan
from meshwright.plan_fields.constraints import make_constraints
from meshwright.plan_fields.effects import Numerics
from meshwright.plan_fields.groups import Axes
from meshwright.planner.bounds import BoundCalculator
from meshwright.planner.candidates import RECOMPUTES, AxisSizes, candidate_series, possible_axis_sizes
from meshwright.planner.constraints.apply import constrained
from meshwright.planner.explanation.explain import explain, step_shares
from meshwright.planner.explanation.report import predict_given_plan
from meshwright.planner.inputs import TOP, PlanningInputs
from meshwright.planner.model_summary import ModelSummary
from meshwright.planner.offload import search_with_offload
from meshwright.planner.profiles import Profiles
from meshwright.planner.search import search
from meshwright.planner.search_result import MOST_NOT_SIMULATED, PricedPlan, SearchResult, evenly
from meshwright.planner.summarize import summarize_model
from meshwright.profile.structure.splits import ParameterSplit, SplitGroup
from meshwright.simulator.predict import predict_plan
from meshwright.simulator.traffic import exchanges
from tests.planner.cases import (
    ADAMW,
    MOMENTUM,
    cluster_with,
    faster_links,
    frozen_decoder,
    images,
    one_layer,
    published_decoder,
    search_plans,
    small_decoder,
)
from tests.soaked import all_but

PCIE = "8xV100@PCIe3-x16"


@cache
def search_vgg16_over_pcie(allow: Numerics) -> tuple[PlanningInputs, SearchResult]:
    return search_plans(PCIE, images("vgg16"), 256, optimizer=MOMENTUM, allow=allow)


@cache
def search_small_decoder(cluster: str, top: int = TOP) -> tuple[PlanningInputs, SearchResult]:
    return search_plans(cluster, small_decoder(), 64, top=top)


def step_s(priced: PricedPlan) -> float:
    return priced.prediction.step_s


def gain_of_splitting(result: SearchResult) -> float:
    """Returns the share of the step time that the best plan with split layers saves over the best one without."""
    plans = (*result.ranked, *result.family_bests)
    split, whole = (
        [step_s(priced) for priced in plans if bool(priced.plan.modules.splits) == is_split]
        for is_split in (True, False)
    )
    return 1 - min(split) / min(whole)


def test_vgg16_over_pcie_splits_the_fully_connected_layers() -> None:
    inputs, result = search_vgg16_over_pcie("changes")
    best = result.ranked[0].plan
    assert best.axes == Axes(replicate=8)
    assert {name: split.kind for name, split in best.modules.splits.items()} == {
        "classifier.0": "column",
        "classifier.3": "row",
        "classifier.6": "column",
    }
    explanation = " ".join(explain(result, inputs))
    assert "hold 89% of the weights but do under 1% of the multiplications" in explanation
    assert "saves an all-reduce of 472 MiB per step" in explanation
    assert "would fit on one device" in explanation
    assert "PCIe3-x16" in explanation


def test_the_all_reduce_that_the_explanation_says_is_saved_is_not_sent() -> None:
    inputs, result = search_vgg16_over_pcie("same")
    best, profile = result.ranked[0], result.summary.profile
    sent = exchanges(profile, best.plan, best.candidate.microbatch_samples)
    combined = sum(e.bytes * e.count for e in sent if (e.axis, e.collective) == ("replicate", "all_reduce"))
    saved = profile.parameter_bytes - combined
    assert f"saves an all-reduce of {bytes_text(saved)} per step" in " ".join(explain(result, inputs))
    weight_bytes = best.prediction.memory.breakdown["weights"]
    assert weight_bytes == pytest.approx(combined + saved / 8)


@pytest.mark.parametrize("batch", [1, 64])
def test_the_step_is_explained_by_shares_that_add_up_to_100_percent_largest_first(batch: int) -> None:
    _, result = search_plans("2xA100-80GB", small_decoder(), batch)
    best = result.ranked[0]
    sentence = step_shares(best.plan, best.prediction)
    shares = [float(share) for share in re.findall(r"([\d.]+)% ", sentence)]
    assert sum(shares) == pytest.approx(100)
    assert shares == sorted(shares, reverse=True)
    largest = max(best.prediction.breakdown.values())
    assert shares[0] == pytest.approx(100 * largest / step_s(best), abs=0.1)


def test_wide_layers_are_split_as_their_groups_are() -> None:
    _, result = search_vgg16_over_pcie("same")
    summary = result.summary
    assert {name: split.kind for name, split in summary.wide_splits(8).items()} == {
        "classifier.0": "column",
        "classifier.3": "row",
        "classifier.6": "column",
    }
    assert set(summary.wide_splits(16)) == {"classifier.0", "classifier.3"}  # 16 ranks do not divide 1,000 classes
    later = SplitGroup("classifier.3", 4096, (
        ParameterSplit("classifier.3", "classifier.3.weight", "column", 0, 4096, "classifier.3"),
        ParameterSplit("classifier.6", "classifier.6.weight", "row", 1, 4096, "classifier.3"),
    ))  # fmt: skip
    assert summary.structure is not None
    changed = replace(summary.profile, structure=replace(summary.structure, splits=(later,)))
    kinds = [split.kind for split in ModelSummary(changed, summary.device).wide_splits(8).values()]
    assert kinds == ["column", "column", "row"]


@pytest.mark.parametrize("allow", all_but({"same"}, ["same", "changes"]))
def test_the_gain_of_splitting_depends_on_the_links(allow: Numerics) -> None:
    _, over_pcie = search_vgg16_over_pcie(allow)
    _, over_faster_links = search_plans(faster_links(PCIE, 10), images("vgg16"), 256, optimizer=MOMENTUM, allow=allow)
    assert gain_of_splitting(over_faster_links) < 0.05
    assert gain_of_splitting(over_faster_links) < gain_of_splitting(over_pcie) / 3


@pytest.mark.soak
def test_resnet50_is_not_split() -> None:
    _, result = search_plans(PCIE, images("resnet50"), 256, optimizer=MOMENTUM)
    best = result.ranked[0].plan
    assert not best.modules.splits
    assert best.axes.tensor == best.axes.pipeline == 1


def test_plans_are_ranked_and_fit() -> None:
    inputs, result = search_small_decoder("2x8xA100-80GB", 8)
    times = [step_s(priced) for priced in result.ranked]
    assert times == sorted(times)
    assert len(times) == 8
    assert all(priced.needed_bytes <= inputs.capacity_bytes for priced in result.ranked)
    assert all(priced.plan.world_size == 16 for priced in result.ranked)
    assert result.priced_count < result.candidate_count


def test_every_simulated_plan_is_kept_and_a_bounded_number_of_the_others() -> None:
    _, result = search_small_decoder("2x8xA100-80GB", 8)
    simulated = {priced.candidate for priced in result.simulated}
    others = {bounded.candidate for bounded in result.not_simulated}
    assert len(simulated) == result.priced_count
    assert {priced.candidate for priced in (*result.ranked, *result.family_bests)} <= simulated
    assert not simulated & others
    assert 0 < len(others) <= MOST_NOT_SIMULATED
    assert all(bounded.guess_s > 0 for bounded in result.not_simulated)
    assert len(evenly(range(10 * MOST_NOT_SIMULATED + 1))) <= MOST_NOT_SIMULATED


@pytest.mark.parametrize(
    ("cluster", "make_profiles", "batch"),
    [
        (find_cluster("8xA100-80GB"), small_decoder, 64),
        pytest.param(find_cluster("2xA100-80GB"), frozen_decoder, 8, marks=pytest.mark.soak),
        (faster_links(PCIE, 10), partial(images, "vgg16"), 256),
    ],
    ids=["decoder", "frozen decoder", "wide layers"],
)
def test_bounds_exclude_no_plan_that_is_better(
    cluster: Cluster, make_profiles: Callable[[], Profiles], batch: int
) -> None:
    profiles = make_profiles()
    inputs, result = search_plans(cluster, profiles, batch)
    summary = summarize_model(inputs, profiles, inputs.precisions_to_try()[0])
    calculator = BoundCalculator(summary, inputs)
    for priced in result.simulated:
        bound = calculator.bounds(priced.candidate)
        assert bound is not None
        assert bound.floor_s <= step_s(priced)
        assert bound.memory_bytes <= priced.needed_bytes


@pytest.mark.soak
def test_frozen_weights_need_no_gradients_and_no_optimizer_state() -> None:
    with pytest.raises(InputError, match="the model fits no plan"):
        search_plans("1xV100-16GB", small_decoder(), 1, memory_margin=0.91)
    inputs, result = search_plans("1xV100-16GB", frozen_decoder(), 1, memory_margin=0.91)
    assert result.ranked[0].needed_bytes <= inputs.capacity_bytes


def test_no_hand_made_plan_is_faster() -> None:
    inputs, result = search_small_decoder("8xA100-80GB")
    assert result.ranked[0].plan.world_size == 8
    for axes in (Axes(replicate=8), Axes(shard=8), Axes(tensor=8), Axes(tensor=2, replicate=4)):
        plan = Plan.model_validate({"axes": axes, "numerics": {"precision": "bf16"}})
        prediction = predict_plan(inputs.cluster, small_decoder().get("bf16", "none"), plan, 64, ADAMW)
        assert step_s(result.ranked[0]) <= prediction.step_s * 1.001, plan.summary()


def test_plans_that_may_change_nothing_do_not_change_the_numerics() -> None:
    _, result = search_vgg16_over_pcie("same")
    for priced in result.ranked:
        for name, group in priced.plan:
            for field, info in type(group).model_fields.items():
                extra = info.json_schema_extra
                assert isinstance(extra, dict)
                changed = getattr(group, field) != info.default
                assert not changed or extra["numerics"] == "same", f"{name}.{field}"


def test_a_model_that_fits_no_plan_says_by_how_much_and_what_comes_closest() -> None:
    with pytest.raises(InputError) as refused:
        search_plans("2xV100", small_decoder(layers=32, hidden=8192), 8)
    explanation = str(refused.value)
    assert "fits no plan on '2xV100': the closest, " in explanation
    assert "GiB too much" in explanation
    assert re.search(
        r"Without offload, \d+ devices of this kind are needed at least, for weights, gradients", explanation
    )
    assert "\n" not in explanation


def test_a_model_that_does_not_fit_says_what_the_closest_plan_needs_and_on_how_many_devices_it_would() -> None:
    profiles, cluster = small_decoder(), cluster_with("RTX3090", memory_bytes=3 * 2**29)
    with pytest.raises(InputError) as refused:
        search_plans(cluster, profiles, 96, allow="same")
    words = str(refused.value)
    match = re.search(r"closest, .*, needs (\S+) GiB, but .* too much: use (\d+) RTX3090, of each of which", words)
    assert match is not None, words
    assert "or a device with" in words
    least = min(
        predict_plan(cluster, profiles.get("fp32", recompute), plan, 96, ADAMW).memory.device_bytes
        for recompute in RECOMPUTES
        for plan in [Plan.model_validate({"memory": {"recompute": recompute, "accumulation": 96}})]
    )
    assert float(match[1]) == pytest.approx(least / 2**30, rel=0.01)
    devices = int(match[2])
    assert 96 % devices == 0
    inputs = PlanningInputs(cluster, 96, ADAMW, allow="same")

    def needed(number: int) -> int:
        memory = {"recompute": "full", "accumulation": 96 // number}
        plan = Plan.model_validate({"axes": {"shard": number}, "memory": memory})
        on = cluster.with_device_count(number)
        return predict_plan(on, profiles.get("fp32", "full"), plan, 96, ADAMW).memory.device_bytes

    assert needed(devices) <= inputs.capacity_bytes
    fewer = [number for number in range(2, devices) if 96 % number == 0]
    assert all(needed(number) > inputs.capacity_bytes for number in fewer)


def test_a_batch_that_no_axis_divides_has_shares_that_differ_by_one_sample() -> None:
    _, result = search_plans(PCIE, one_layer(), 257)
    best = result.ranked[0]
    assert best.plan.shares.samples == (33, *(32,) * 7)
    assert {priced.plan.world_size for priced in result.ranked} == {8}


def test_a_plan_may_leave_out_devices_beyond_a_power_of_two() -> None:
    """An all-reduce over nine machines takes about twice as long as one over eight."""
    inputs, eight = search_plans("8x8xH100@Ethernet-10G", one_layer(), 72)
    more, nine = search_plans("9x8xH100@Ethernet-10G", one_layer(), 72)
    assert nine.ranked[0].prediction.step_s <= 1.03 * eight.ranked[0].prediction.step_s
    assert {sizes.ranks for sizes in possible_axis_sizes(nine.summary, more)} == {72, 64}
    assert {sizes.ranks for sizes in possible_axis_sizes(eight.summary, inputs)} == {64}
    assert {sizes.ranks for sizes in possible_axis_sizes(eight.summary, replace(inputs, most_ranks=5))} == {5, 4}
    given = predict_given_plan(eight.ranked[0].plan, more, one_layer())
    assert " on 64 of 72 devices trains 72 samples in " in given.explanation[0]


def test_unequal_shares_may_be_cut_into_unequal_microbatches() -> None:
    """Of 31 samples on two devices, 16 and 15 do not divide into three microbatches of equal size."""
    inputs = PlanningInputs(find_cluster("2xA100-80GB"), 31, ADAMW)
    summary = summarize_model(inputs, small_decoder(), "bf16")
    (series, *_) = candidate_series(summary, AxisSizes(replicate=2), inputs, "bf16")
    assert [candidate.microbatches for candidate in series] == list(range(15, 0, -1))
    assert all(candidate.microbatches * candidate.microbatch_samples == 16 for candidate in series)
    (series, *_) = candidate_series(summary, AxisSizes(replicate=2), replace(inputs, global_batch=32), "bf16")
    assert [candidate.microbatches for candidate in series] == [16, 8, 4, 2, 1]
    fixed = constrained(inputs, make_constraints({"memory.accumulation": 3, "axes.replicate": 2}))
    best = search(fixed, small_decoder()).ranked[0].plan
    assert (best.microbatches, best.shares.samples) == (3, (16, 15))


def test_a_model_that_is_too_large_for_one_gpu_says_so() -> None:
    """There is no other device with which it could divide parameters in CPU memory."""
    inputs = PlanningInputs(find_cluster("1xRTX4090"), 8, ADAMW)
    with pytest.raises(InputError, match=r"fits no plan on '1xRTX4090'.*GiB too much.*devices of this kind are needed"):
        search_with_offload(inputs, small_decoder(layers=32, hidden=8192))


def test_a_batch_smaller_than_the_ranks_uses_fewer() -> None:
    _, result = search_plans(PCIE, one_layer(), 4)
    assert result.ranked[0].plan.world_size <= 4


def test_plans_that_the_executor_refuses_are_not_proposed() -> None:
    def replicas_only(plan: Plan) -> None:
        if plan.axes != Axes(replicate=8):
            raise InputError("not this one")

    _, result = search_plans("8xA100-80GB", small_decoder(), 64, check_plan=replicas_only)
    assert {priced.plan.axes for priced in result.ranked} == {Axes(replicate=8)}


def test_a_cluster_with_a_price_has_a_cost() -> None:
    inputs, result = search_small_decoder("8xA100-80GB")
    cluster = inputs.cluster.model_copy(update={"price_per_hour": 32.0})
    inputs = replace(inputs, cluster=cluster, epoch_samples=6400)
    explanation = " ".join(explain(result, inputs))
    expected = 32.0 * 100 * step_s(result.ranked[0]) / 3600
    assert f"At 32 per hour, an epoch of 6,400 samples costs {expected:.3g} and takes " in explanation


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "hidden", "heads", "layers", "nodes", "batch", "pipeline"), [
    ("76B", 10240, 80, 60, 128, 1792, 4),
    ("145B", 12288, 96, 80, 192, 2304, 8),
])  # fmt: skip
def test_the_winner_is_as_fast_as_the_published_plan(
    name: str, hidden: int, heads: int, layers: int, nodes: int, batch: int, pipeline: int
) -> None:
    profiles = published_decoder("gpt3-175B", hidden=hidden, heads=heads, layers=layers, vocabulary=51200)
    inputs = PlanningInputs(find_cluster(f"{nodes}x8xA100-80GB"), batch, ADAMW)
    result = search(inputs, profiles)
    cuts = [f"blocks.{layers * (stage + 1) // pipeline - 1}" for stage in range(pipeline - 1)]
    replicate = nodes // pipeline
    plan = Plan.model_validate(
        {
            "axes": {"tensor": 8, "pipeline": pipeline, "replicate": replicate},
            "pipeline": {"cuts": cuts, "microbatches": batch // replicate},
            "memory": {"recompute": "full"},
            "numerics": {"precision": "bf16"},
        }
    )
    published = predict_plan(inputs.cluster, profiles.get("bf16", "full"), plan, batch, ADAMW)
    assert step_s(result.ranked[0]) <= published.step_s


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_gpt3_plans_follow_the_network() -> None:
    profiles = published_decoder("gpt3-175B")
    selene, ethernet = (search_plans(f"128x8xA100-80GB{link}", profiles, 1536) for link in ("", "@Ethernet-10G"))
    assert selene[1].ranked[0].plan.axes != ethernet[1].ranked[0].plan.axes
    assert "Ethernet-10G" in " ".join(explain(ethernet[1], ethernet[0]))
    assert selene[1].seconds < 60
