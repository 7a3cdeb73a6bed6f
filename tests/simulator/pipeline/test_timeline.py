"""A pipeline's timeline: what it takes, who waits, and that nothing starts before what it needs."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.simulator.pipeline.order import Action, Order, PassKind, pipeline_order
from meshwright.simulator.pipeline.timeline import Timeline, pipeline_span, timeline
from tests.simulator.pipeline.test_order import Sizes, sizes_that_run

seconds = st.floats(0.125, 8.0)


def equal(forward_s: float, backward_s: float, weights_s: float = 0.0) -> Callable[[Action], float]:
    costs: dict[PassKind, float] = {
        "forward": forward_s,
        "backward": backward_s + weights_s,
        "input_backward": backward_s,
        "weight_backward": weights_s,
    }
    return lambda action: costs[action.kind]


def at_once(_: int, __: int) -> float:
    return 0.0


@settings(max_examples=80, deadline=None)
@given(sizes_that_run, st.data())
def test_nothing_overlaps_and_nothing_starts_before_what_it_needs(sizes: Sizes, data: st.DataObject) -> None:
    order = pipeline_order(*sizes)
    stages = sizes[1] * sizes[2]
    costs = data.draw(st.lists(seconds, min_size=stages, max_size=stages))
    hop = data.draw(st.sampled_from([0.0, 0.01, 3.0]))
    found = timeline(order, lambda a: costs[a.stage] * (1 + a.microbatch % 3), lambda a, b: hop * (1 + min(a, b)))
    ends = {(e.stage, e.microbatch, e.kind.removeprefix("input_")): e for e in found.events()}
    for rank, actions in enumerate(order):
        mine = [event for event in found.events() if event.rank == rank]
        assert [(e.stage, e.microbatch, e.kind) for e in mine] == list(actions)
        assert all(before.end_s <= after.start_s for before, after in pairwise(mine))
        assert found.busy_s[rank] == pytest.approx(sum(e.end_s - e.start_s for e in mine))
        assert found.busy_s[rank] + found.bubble_s[rank] == pytest.approx(found.span_s)
        assert found.bubble_s[rank] >= -1e-9 * found.span_s
    for event in found.events():
        s, m = event.stage, event.microbatch
        if event.kind == "forward":
            needed = ends.get((s - 1, m, "forward"))
        elif event.kind == "weight_backward":
            needed = ends[s, m, "backward"]
        else:
            assert ends[s, m, "forward"].end_s <= event.start_s
            needed = ends.get((s + 1, m, "backward"))
        if needed is not None:
            delay = hop * (1 + min(s, needed.stage)) if needed.rank != event.rank else 0.0
            assert needed.end_s + delay <= event.start_s


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(0, 30), seconds, seconds, st.floats(0, 20))
def test_equal_stages_take_what_the_closed_form_says(
    schedule: str, ranks: int, more: int, forward_s: float, backward_s: float, transfer_s: float
) -> None:
    order = pipeline_order(schedule, ranks, 1, ranks + more)
    found = timeline(order, equal(forward_s, backward_s), lambda _, __: transfer_s)
    assert found.span_s == pytest.approx(
        pipeline_span(schedule, ranks, 1, ranks + more, forward_s, backward_s, transfer_s)
    )
    assert pipeline_span(schedule, ranks, 1, ranks + more, forward_s, backward_s) == pytest.approx(
        (2 * ranks + more - 1) * (forward_s + backward_s)
    )


@settings(max_examples=60, deadline=None)
@given(sizes_that_run.filter(lambda sizes: sizes[0] == "interleaved_1f1b"), seconds, seconds)
def test_interleaving_divides_the_bubble(sizes: Sizes, forward_s: float, backward_s: float) -> None:
    _, ranks, stages_per_rank, microbatches = sizes
    found = timeline(pipeline_order(*sizes), equal(forward_s, backward_s), at_once)
    assert found.span_s == pytest.approx(pipeline_span(*sizes, forward_s, backward_s))
    if microbatches >= ranks:
        of_a_rank = stages_per_rank * (forward_s + backward_s)
        assert found.bubble_s == pytest.approx([(ranks - 1) * of_a_rank / stages_per_rank] * ranks, abs=1e-9)


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("zero_bubble", 1), ("zero_bubble", 2), ("zbv", 2)])
def test_weight_gradients_fill_the_bubble(schedule: str, stages_per_rank: int) -> None:
    ranks, microbatches = 4, 16
    found = timeline(pipeline_order(schedule, ranks, stages_per_rank, microbatches), equal(1.0, 1.0, 1.0), at_once)
    one_f_one_b = pipeline_span("1f1b", ranks, 1, microbatches, stages_per_rank, 2 * stages_per_rank)
    assert found.bubble_s == pytest.approx([ranks - 1.0] * ranks)
    assert found.span_s < one_f_one_b


@settings(max_examples=40, deadline=None)
@given(sizes_that_run, st.data())
def test_uneven_stages_take_at_least_what_the_slowest_does(sizes: Sizes, data: st.DataObject) -> None:
    _, ranks, stages_per_rank, microbatches = sizes
    costs = data.draw(st.lists(seconds, min_size=ranks * stages_per_rank, max_size=ranks * stages_per_rank))
    found = timeline(pipeline_order(*sizes), lambda action: costs[action.stage], at_once)
    assert found.span_s >= 2 * microbatches * max(costs) * (1 - 1e-9)


def test_one_slow_stage_in_a_pipeline() -> None:
    found = timeline(pipeline_order("1f1b", 2, 1, 3), lambda action: 1.0 + action.stage, at_once)
    first = [(e.kind, e.microbatch, e.start_s, e.end_s) for e in found.events() if e.rank == 0]
    assert first == [
        ("forward", 0, 0.0, 1.0),
        ("forward", 1, 1.0, 2.0),
        ("backward", 0, 5.0, 6.0),
        ("forward", 2, 6.0, 7.0),
        ("backward", 1, 9.0, 10.0),
        ("backward", 2, 13.0, 14.0),
    ]
    assert (found.span_s, found.busy_s, found.bubble_s) == (14.0, (6.0, 12.0), (8.0, 2.0))


def test_neighbouring_stages_on_one_rank_hand_over_without_a_transfer() -> None:
    asked: list[tuple[int, int]] = []

    def transfer(source: int, stage: int) -> float:
        asked.append((source, stage))
        return 1.0

    timeline(pipeline_order("zbv", 2, 2, 4), equal(1.0, 1.0, 1.0), transfer)
    assert sorted(asked) == [(0, 1), (1, 0), (2, 3), (3, 2)]


@pytest.mark.parametrize(
    "order",
    [
        ((Action(0, 0, "backward"), Action(0, 0, "forward")),),
        ((Action(0, 0, "forward"),), (Action(1, 0, "backward"), Action(1, 0, "forward"))),
        ((Action(0, 0, "forward"), Action(0, 0, "weight_backward"), Action(0, 0, "input_backward")),),
        ((Action(0, 0, "forward"), Action(2, 0, "forward")), (Action(1, 1, "forward"),)),
    ],
)
def test_an_order_that_cannot_run_is_refused(order: Order) -> None:
    with pytest.raises(ValueError, match="waits forever"):
        timeline(order, equal(1.0, 1.0), at_once)


def test_a_large_pipeline_asks_each_price_once() -> None:
    asked = 0

    def cost(_: Action) -> float:
        nonlocal asked
        asked += 1
        return 1.0

    found: Timeline = timeline(pipeline_order("1f1b", 64, 1, 512), cost, at_once)
    assert asked == 64 * 512 * 2
    assert found.span_s == pipeline_span("1f1b", 64, 1, 512, 1.0, 1.0)


def test_other_schedules_have_no_closed_form() -> None:
    with pytest.raises(ValueError, match="run its timeline"):
        pipeline_span("zbv", 4, 2, 8, 1.0, 1.0)
