"""The winner is the fastest plan that fits, for reasons that follow the hardware."""

from dataclasses import replace

import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find
from meshwright.errors import InputError
from meshwright.plan import Axes, Plan
from meshwright.planner.explain import explain
from meshwright.planner.outline import Outline
from meshwright.planner.profiles import Profiles
from meshwright.planner.prune import Bounder
from meshwright.planner.question import Question
from meshwright.planner.search import Choice, Found, outline_of, search
from meshwright.profile.structure.splits import Split, SplitGroup
from meshwright.simulator.predict import predict_plan
from tests.planner.questions import (
    ADAMW,
    MOMENTUM,
    ask,
    faster_links,
    images,
    one_layer,
    published_decoder,
    small_decoder,
)
from tests.simulator.traffic import exchanges

PCIE = "8xV100@PCIe3-x16"


def step_s(choice: Choice) -> float:
    return choice.prediction.step_s


def gain_of_splitting(found: Found) -> float:
    """By how much the best plan with the wide layers split is shorter than the best of all that split none."""
    choices = (*found.ranked, *found.others)
    split, whole = (
        [step_s(c) for c in choices if bool(c.plan.modules.splits) == is_split] for is_split in (True, False)
    )
    return 1 - min(split) / min(whole)


def test_vgg16_over_pcie_splits_the_fully_connected_layers() -> None:
    question, found = ask(PCIE, images("vgg16"), 256, optimizer=MOMENTUM)
    best = found.ranked[0].plan
    assert best.axes == Axes(replicate=8)
    assert {name: split.kind for name, split in best.modules.splits.items()} == {
        "classifier.0": "column",
        "classifier.3": "row",
        "classifier.6": "column",
    }
    said = " ".join(explain(found, question))
    assert "hold 89% of the weights but under 1% of the multiplications" in said
    assert "spares an all-reduce of 495 MB a step" in said
    assert "could stay whole" in said
    assert "PCIe3-x16" in said


def test_what_the_explanation_says_is_spared_is_not_sent() -> None:
    question, found = ask(PCIE, images("vgg16"), 256, optimizer=MOMENTUM, exact=True)
    best, profile = found.ranked[0], found.outline.profile
    sent = exchanges(profile, best.plan, best.candidate.batch)
    combined = sum(e.bytes * e.count for e in sent if (e.axis, e.collective) == ("replicate", "all_reduce"))
    spared = profile.parameter_bytes - combined
    assert f"spares an all-reduce of {spared / 1e6:.0f} MB a step" in " ".join(explain(found, question))
    held = best.prediction.memory.breakdown["weights"]
    assert held == pytest.approx(combined + spared / 8)


def test_wide_layers_are_split_as_their_groups_are() -> None:
    _, found = ask(PCIE, images("vgg16"), 256, optimizer=MOMENTUM, exact=True)
    outline = found.outline
    assert {name: split.kind for name, split in outline.wide_splits(8).items()} == {
        "classifier.0": "column",
        "classifier.3": "row",
        "classifier.6": "column",
    }
    assert set(outline.wide_splits(16)) == {"classifier.0", "classifier.3"}  # 16 ranks do not divide 1,000 classes
    later = SplitGroup("classifier.3", 4096, (
        Split("classifier.3", "classifier.3.weight", "column", 0, 4096, "classifier.3"),
        Split("classifier.6", "classifier.6.weight", "row", 1, 4096, "classifier.3"),
    ))  # fmt: skip
    assert outline.structure is not None
    changed = replace(outline.profile, structure=replace(outline.structure, splits=(later,)))
    kinds = [split.kind for split in Outline(changed, outline.device).wide_splits(8).values()]
    assert kinds == ["column", "column", "row"]


@pytest.mark.parametrize("exact", [True, False])
def test_what_splitting_gains_follows_the_links(exact: bool) -> None:
    gains = [
        gain_of_splitting(ask(cluster, images("vgg16"), 256, optimizer=MOMENTUM, exact=exact)[1])
        for cluster in (find(PCIE), faster_links(PCIE, 10))
    ]
    assert gains[1] < 0.05
    assert gains[1] < gains[0] / 3


@pytest.mark.soak
def test_resnet50_is_not_split() -> None:
    _, found = ask(PCIE, images("resnet50"), 256, optimizer=MOMENTUM)
    best = found.ranked[0].plan
    assert not best.modules.splits
    assert best.axes.tensor == best.axes.pipeline == 1


def test_plans_are_ranked_and_fit() -> None:
    question, found = ask("2x8xA100-80GB", small_decoder(), 64, top=8)
    times = [step_s(choice) for choice in found.ranked]
    assert times == sorted(times)
    assert len(times) == 8
    assert all(choice.needs_bytes <= question.capacity_bytes for choice in found.ranked)
    assert all(choice.plan.world_size == 16 for choice in found.ranked)
    assert found.priced < found.candidates


@pytest.mark.parametrize(
    ("cluster", "profiles", "batch"),
    [(find("8xA100-80GB"), small_decoder(), 64), (faster_links(PCIE, 10), images("vgg16"), 256)],
    ids=["decoder", "wide layers"],
)
def test_bounds_exclude_no_plan_that_is_better(cluster: Cluster, profiles: Profiles, batch: int) -> None:
    question, found = ask(cluster, profiles, batch)
    outline = outline_of(question, profiles, question.precisions_to_try()[0])
    bounder = Bounder(outline, question)
    for choice in (*found.ranked, *found.others):
        bound = bounder.bounds(choice.candidate)
        assert bound is not None
        assert bound.floor_s <= step_s(choice)
        assert bound.memory_bytes <= choice.needs_bytes


def test_no_hand_made_plan_is_faster() -> None:
    question, found = ask("8xA100-80GB", small_decoder(), 64)
    assert found.ranked[0].plan.world_size == 8
    for axes in (Axes(replicate=8), Axes(shard=8), Axes(tensor=8), Axes(tensor=2, replicate=4)):
        plan = Plan.model_validate({"axes": axes, "numerics": {"precision": "bf16"}})
        other = predict_plan(question.cluster, small_decoder().get("bf16", "none"), plan, 64, ADAMW)
        assert step_s(found.ranked[0]) <= other.step_s * 1.001, plan.summary()


def test_exact_plans_leave_the_numbers_as_they_are() -> None:
    _, found = ask(PCIE, images("vgg16"), 256, optimizer=MOMENTUM, exact=True)
    for choice in found.ranked:
        for name, group in choice.plan:
            for field, info in type(group).model_fields.items():
                extra = info.json_schema_extra
                assert isinstance(extra, dict)
                changed = getattr(group, field) != info.default
                assert not changed or extra["numerics"] == "same", f"{name}.{field}"


def test_a_model_that_fits_no_plan_says_by_how_much_and_what_comes_closest() -> None:
    with pytest.raises(InputError) as refused:
        ask("2xV100", small_decoder(layers=32, hidden=8192), 8)
    said = str(refused.value)
    assert "fits no plan on '2xV100': the closest, " in said
    assert "GiB too much" in said
    assert "\n" not in said


def test_a_batch_that_no_axis_divides() -> None:
    with pytest.raises(InputError, match=r"train\.global_batch is 257, which no axis over the 8 devices"):
        ask(PCIE, one_layer(), 257)


def test_a_batch_smaller_than_the_ranks_uses_fewer() -> None:
    _, found = ask(PCIE, one_layer(), 4)
    assert found.ranked[0].plan.world_size <= 4


def test_a_runtime_may_refuse_plans() -> None:
    def replicas_only(plan: Plan) -> None:
        if plan.axes != Axes(replicate=8):
            raise InputError("not this one")

    _, found = ask("8xA100-80GB", small_decoder(), 64, refuses=replicas_only)
    assert {choice.plan.axes for choice in found.ranked} == {Axes(replicate=8)}


def test_a_price_makes_a_cost() -> None:
    cluster = find("8xA100-80GB").model_copy(update={"price_per_hour": 32.0})
    question, found = ask(cluster, small_decoder(), 64, samples=6400)
    said = " ".join(explain(found, question))
    expected = 32.0 * 100 * step_s(found.ranked[0]) / 3600
    assert f"At 32.00 an hour an epoch of 6,400 samples cost {expected:,.2f}" in said


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
    question = Question(find(f"{nodes}x8xA100-80GB"), batch, ADAMW)
    found = search(question, profiles)
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
    published = predict_plan(question.cluster, profiles.get("bf16", "full"), plan, batch, ADAMW)
    assert step_s(found.ranked[0]) <= published.step_s


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_gpt3_plans_follow_the_network() -> None:
    profiles = published_decoder("gpt3-175B")
    selene, ethernet = (ask(f"128x8xA100-80GB{link}", profiles, 1536) for link in ("", "@Ethernet-10G"))
    assert selene[1].ranked[0].plan.axes != ethernet[1].ranked[0].plan.axes
    assert "Ethernet-10G" in " ".join(explain(ethernet[1], ethernet[0]))
    assert selene[1].seconds < 60
