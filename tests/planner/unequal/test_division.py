"""Plans for machines that are not alike: shares and cuts by speed, memory by device, and what the report says."""

from functools import cache
from itertools import product

import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_fields.constraints import make_constraints
from meshwright.plan_fields.groups import Axes, Shares
from meshwright.planner.candidates import possible_axis_sizes
from meshwright.planner.constraints.apply import constrained
from meshwright.planner.explanation.explain import explain
from meshwright.planner.explanation.report import predict_given_plan, report_search
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.search import search
from meshwright.planner.search_result import SearchResult
from meshwright.planner.summarize import summarize_model
from meshwright.planner.unequal.division import with_best_shares, with_cuts_by_speed
from meshwright.report.plans.step import timeline_chart, timeline_values
from meshwright.simulator.predict import predict_plan
from meshwright.simulator.rank_rows import row_names, step_timeline
from tests.planner.cases import ADAMW, MOMENTUM, images, search_plans, small_decoder

A100_AND_V100 = "8xA100-40GB+8xV100"
BATCH = 1024
SIMPLE = {"axes.replicate": 4, "memory.accumulation": 1, "memory.recompute": "none", "compute.compile": "none"}


@cache
def resnet_search() -> tuple[PlanningInputs, SearchResult]:
    return search_plans(A100_AND_V100, images("resnet50"), BATCH, optimizer=MOMENTUM)


@pytest.mark.soak
def test_resnet_trains_at_the_sum_of_the_two_speeds() -> None:
    """Over equal shares, at least 95% of what the speeds of the devices allow: (r₁ + r₂) / (2 · min r)."""
    _, result = resnet_search()
    best = result.ranked[0]
    assert best.even is not None
    assert best.even[0] == best.plan.model_copy(update={"shares": Shares()})
    one = best.even[0].model_copy(update={"axes": Axes()})
    profile = images("resnet50").get(one.numerics.precision, "none")
    rates = [
        BATCH // 16 / predict_plan(find_cluster(name), profile, one, BATCH // 16, MOMENTUM).step_s
        for name in ("A100-40GB", "V100")
    ]
    allowed = sum(rates) / (2 * min(rates))
    gained = best.even[1].step_s / best.prediction.step_s
    assert allowed > 1.3
    assert gained >= 0.95 * allowed


@pytest.mark.soak
def test_shares_are_found_once_launches_no_longer_hide_the_speeds() -> None:
    """With few samples on each GPU, only compiled models and CUDA graphs are faster on the faster GPU."""
    _, result = search_plans(A100_AND_V100, images("resnet50"), 256, optimizer=MOMENTUM)
    best = result.ranked[0]
    assert best.plan.compute.cuda_graphs
    first, *_, last = best.plan.shares.samples
    assert first > 1.5 * last
    assert best.even is not None
    assert best.even[1].step_s > 1.2 * best.prediction.step_s


def test_the_report_says_who_gets_how_much_and_why() -> None:
    free = PlanningInputs(find_cluster("2xA100-40GB+2xV100"), 64, ADAMW)
    inputs = constrained(free, make_constraints(SIMPLE))
    result = search(inputs, small_decoder())
    best, words = result.ranked[0], " ".join(explain(result, inputs))
    many, few = best.plan.shares.samples[0], best.plan.shares.samples[2]
    assert sum(best.plan.shares.samples) == 64
    assert many > few
    assert best.even is not None
    assert best.even[1].step_s > 1.1 * best.prediction.step_s
    assert f"A100-40GB ranks get {many}" in words
    assert f"and V100-16GB ranks {few}" in words
    assert "times as many samples per second as V100-16GB; equal shares would take 1." in words
    assert "Ranks 0 to 1 are on A100-40GB, ranks 2 to 3 are on V100-16GB" in words
    entry = report_search(result, inputs, small_decoder()).to_dict()["best"]
    assert [(group["ranks"], group["samples"]) for group in entry["data_ranks"]] == [([0, 1], many), ([2, 3], few)]
    assert max(group["step_s"] for group in entry["data_ranks"]) == entry["step_s"]


LONG = [("A100+V100", 48), ("H100+A100+V100", 14), ("A100-40GB+V100", 33)]


@pytest.mark.parametrize(
    ("cluster", "batch"),
    [("A100+V100", 13), ("A100+V100+T4", 7), *(pytest.param(*case, marks=pytest.mark.soak) for case in LONG)],
)
def test_no_other_whole_shares_are_predicted_to_be_faster(cluster: str, batch: int) -> None:
    machines = find_cluster(cluster)
    profile = small_decoder(2, 256).get("fp16", "none")
    ranks = machines.device_count
    plan = Plan.model_validate({"axes": {"replicate": ranks}, "numerics": {"precision": "fp16"}})
    inputs = PlanningInputs(machines, batch, ADAMW)
    best = with_best_shares(plan, inputs, profile)
    assert best is not None

    def step_s(samples: tuple[int, ...]) -> float:
        shared = plan.model_copy(update={"shares": Shares(samples=samples)})
        return predict_plan(machines, profile, shared, batch, ADAMW).step_s

    all_shares = [shares for shares in product(range(1, batch), repeat=ranks) if sum(shares) == batch]
    assert step_s(best.shares.samples) == min(map(step_s, all_shares))


def test_memory_of_the_smaller_device_limits_its_share() -> None:
    """Devices that are equally fast, one of which has little memory."""
    machines = find_cluster("A100-80GB+A100-40GB")
    profile = small_decoder().get("fp16", "none")
    plan = Plan.model_validate({"axes": {"replicate": 2}, "numerics": {"precision": "fp16"}})
    large, small = machines.nodes
    needed = predict_plan(machines, profile, plan, 64, ADAMW).memory.device_bytes
    device = small.device.model_copy(update={"memory_bytes": needed})
    machines = machines.model_copy(update={"nodes": (large, small.model_copy(update={"device": device}))})
    inputs = PlanningInputs(machines, 64, ADAMW)
    assert not inputs.fits(predict_plan(machines, profile, plan, 64, ADAMW))
    shared = with_best_shares(plan, inputs, profile)
    assert shared is not None
    many, few = shared.shares.samples
    assert many > 32 > few > 16
    assert inputs.fits(predict_plan(machines, profile, shared, 64, ADAMW))
    one_more = plan.model_copy(update={"shares": Shares(samples=(many - 1, few + 1))})
    assert not inputs.fits(predict_plan(machines, profile, one_more, 64, ADAMW))


def test_a_pipeline_is_cut_by_the_speed_of_its_ranks() -> None:
    inputs = PlanningInputs(find_cluster("A100-80GB+V100-32GB"), 32, ADAMW)
    simple = {"axes.pipeline": 2, "pipeline.schedule": "1f1b", "memory.recompute": "none"}
    fixed = constrained(inputs, make_constraints(simple))
    result = search(fixed, small_decoder())
    best = result.ranked[0]
    assert best.even is not None
    names = [piece.name for piece in result.summary.pieces]
    (by_speed,), (even,) = best.plan.pipeline.cuts, best.even[0].pipeline.cuts
    assert names.index(by_speed) > names.index(even)
    assert best.prediction.step_s < 0.9 * best.even[1].step_s
    words = " ".join(explain(result, fixed))
    assert f"The stages on A100-80GB hold {names.index(by_speed) + 1} of the {len(names)} pieces of the model" in words
    swapped = PlanningInputs(find_cluster("V100-32GB+A100-80GB"), 32, ADAMW)
    (other,) = with_cuts_by_speed(best.even[0], swapped, result.summary).pipeline.cuts
    assert names.index(other) < names.index(even)


def test_ranks_that_compute_together_have_equal_devices() -> None:
    inputs = PlanningInputs(find_cluster("6xA100-80GB+2xV100-32GB"), 64, ADAMW)
    summary = summarize_model(inputs, small_decoder(), "fp16")
    assert {sizes.tensor for sizes in possible_axis_sizes(summary, inputs)} == {1, 2}
    together = Plan.model_validate({"axes": {"tensor": 8}, "numerics": {"precision": "fp16"}})
    profile = small_decoder().get("fp16", "none")
    mixed, slow = (
        predict_plan(find_cluster(name), profile, together, 64, ADAMW)
        for name in ("6xA100-80GB+2xV100-32GB", "6xV100-32GB+2xV100-32GB")
    )
    assert mixed.breakdown["compute"] == slow.breakdown["compute"]


@pytest.mark.parametrize("name", ["2x2xV100", pytest.param("2x8xA100-80GB", marks=pytest.mark.soak)])
def test_equal_machines_get_the_plans_of_equal_machines(name: str) -> None:
    whole = find_cluster(name)
    (node,) = whole.nodes
    parts = [node.model_copy(update={"number": 1})] * node.number
    divided = whole.model_copy(update={"nodes": tuple(parts)})
    first, second = (search_plans(cluster, small_decoder(2, 256), 64)[1] for cluster in (whole, divided))
    assert [(p.plan, p.prediction) for p in first.ranked] == [(p.plan, p.prediction) for p in second.ranked]
    assert not any(priced.prediction.groups or priced.plan.shares.samples for priced in first.simulated)


def test_shares_can_be_fixed_and_avoided() -> None:
    inputs = PlanningInputs(find_cluster("2xA100-40GB+2xV100"), 64, ADAMW)

    def plans(samples: list[int] | None = None, avoid: tuple[str, ...] = ()) -> set[tuple[int, ...]]:
        fix = SIMPLE if samples is None else {**SIMPLE, "shares.samples": samples}
        ranked = search(constrained(inputs, make_constraints(fix, avoid)), small_decoder(2, 256)).ranked
        return {priced.plan.shares.samples for priced in ranked}

    assert plans(avoid=("shares",)) == {()}
    assert plans([20, 20, 20, 4]) == {(20, 20, 20, 4)}
    with pytest.raises(InputError, match=r"shares\.samples has 3 numbers"):
        plans([20, 20, 24])


def test_a_plan_with_shares_is_predicted_as_it_is() -> None:
    inputs = PlanningInputs(find_cluster("A100-40GB+V100"), 64, ADAMW)
    groups = {"axes": {"replicate": 2}, "numerics": {"precision": "fp16"}, "shares": [60, 4]}
    plan = Plan.model_validate(groups)
    report = predict_given_plan(plan, inputs, small_decoder(2, 256))
    (_, prediction), words = report.ranked[0], " ".join(report.explanation)
    assert "A100-40GB ranks get 60 samples and would take" in words
    assert "V100-16GB ranks get 4 samples and would take" in words
    fast, slow = prediction.groups
    assert prediction.step_s == fast.step.step_s > slow.step.step_s
    assert prediction.batch_per_rank == 60
    timeline = step_timeline(prediction, plan)
    assert timeline is not None
    assert timeline.span_s == timeline.busy_s[0] > timeline.busy_s[1]
    names = ["A100-40GB, data rank 0: 60 samples", "V100-16GB, data rank 1: 4 samples"]
    assert row_names(prediction) == names
    chart = timeline_chart({"timeline": timeline_values(timeline, names), "best": {"plan": plan.model_dump()}})
    assert chart is not None
    assert "waiting (bubble)" in str(chart)
    assert all(name in str(chart) for name in names)


def test_shares_on_equal_devices_wait_for_the_rank_with_most() -> None:
    machines: Cluster = find_cluster("2xA100-40GB")
    profile = small_decoder(2, 256).get("fp16", "none")
    plan = Plan.model_validate({"axes": {"replicate": 2}, "numerics": {"precision": "fp16"}})
    shared = plan.model_copy(update={"shares": Shares(samples=(3, 1))})
    assert (
        predict_plan(machines, profile, shared, 64, ADAMW).step_s
        == predict_plan(machines, profile, plan, 96, ADAMW).step_s
    )
