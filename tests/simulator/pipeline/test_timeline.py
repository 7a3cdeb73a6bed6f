"""The timeline of a pipeline has the right duration and bubbles, and no pass starts before its inputs are there."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.simulator.pipeline.order import Action, Order, PassKind, pipeline_order
from meshwright.simulator.pipeline.timeline import Timeline, timeline
from tests.simulator.pipeline.closed_form import pipeline_span
from tests.simulator.pipeline.test_order import Sizes, sizes_that_run

seconds = st.floats(0.125, 8.0)


def equal_costs(forward_s: float, backward_s: float, weights_s: float = 0.0) -> Callable[[Action], float]:
    costs: dict[PassKind, float] = {
        "forward": forward_s,
        "backward": backward_s + weights_s,
        "input_backward": backward_s,
        "weight_backward": weights_s,
    }
    return lambda action: costs[action.kind]


def no_transfer_time(_: int, __: int) -> float:
    return 0.0


@settings(max_examples=80)
@given(sizes_that_run, st.data())
def test_passes_of_a_rank_do_not_overlap_and_wait_for_their_inputs(sizes: Sizes, data: st.DataObject) -> None:
    order = pipeline_order(*sizes)
    stages = sizes[1] * sizes[2]
    costs = data.draw(st.lists(seconds, min_size=stages, max_size=stages))
    hop = data.draw(st.sampled_from([0.0, 0.01, 3.0]))
    result = timeline(order, lambda a: costs[a.stage], lambda a, b: hop * (1 + min(a, b)))
    ends = {(e.stage, e.microbatch, e.kind.removeprefix("input_")): e for e in result.events()}
    for rank, actions in enumerate(order):
        rank_events = [event for event in result.events() if event.rank == rank]
        assert [(e.stage, e.microbatch, e.kind) for e in rank_events] == list(actions)
        assert all(before.end_s <= after.start_s for before, after in pairwise(rank_events))
        assert result.busy_s[rank] == pytest.approx(sum(e.end_s - e.start_s for e in rank_events))
        assert result.busy_s[rank] + result.idle_s[rank] == pytest.approx(result.span_s)
        assert result.idle_s[rank] >= -1e-9 * result.span_s
    for event in result.events():
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


@settings(max_examples=60)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(0, 30), seconds, seconds, st.floats(0, 20))
def test_the_duration_of_equal_stages_is_the_closed_form(
    schedule: str, ranks: int, extra: int, forward_s: float, backward_s: float, transfer_s: float
) -> None:
    order = pipeline_order(schedule, ranks, 1, ranks + extra)
    result = timeline(order, equal_costs(forward_s, backward_s), lambda _, __: transfer_s)
    assert result.span_s == pytest.approx(
        pipeline_span(schedule, ranks, 1, ranks + extra, forward_s, backward_s, transfer_s)
    )
    assert pipeline_span(schedule, ranks, 1, ranks + extra, forward_s, backward_s) == pytest.approx(
        (2 * ranks + extra - 1) * (forward_s + backward_s)
    )


@settings(max_examples=60)
@given(sizes_that_run.filter(lambda sizes: sizes[0] == "interleaved_1f1b"), seconds, seconds)
def test_interleaving_divides_the_bubble(sizes: Sizes, forward_s: float, backward_s: float) -> None:
    _, ranks, stages_per_rank, microbatches = sizes
    result = timeline(pipeline_order(*sizes), equal_costs(forward_s, backward_s), no_transfer_time)
    assert result.span_s == pytest.approx(pipeline_span(*sizes, forward_s, backward_s))
    if microbatches >= ranks:
        rank_s = stages_per_rank * (forward_s + backward_s)
        assert result.idle_s == pytest.approx([(ranks - 1) * rank_s / stages_per_rank] * ranks, abs=1e-9)


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("zero_bubble", 1), ("zero_bubble", 2), ("zbv", 2)])
def test_weight_gradients_fill_the_bubble(schedule: str, stages_per_rank: int) -> None:
    ranks, microbatches = 4, 16
    result = timeline(
        pipeline_order(schedule, ranks, stages_per_rank, microbatches), equal_costs(1.0, 1.0, 1.0), no_transfer_time
    )
    one_f_one_b = pipeline_span("1f1b", ranks, 1, microbatches, stages_per_rank, 2 * stages_per_rank)
    assert result.idle_s == pytest.approx([ranks - 1.0] * ranks)
    assert result.span_s < one_f_one_b


@settings(max_examples=40)
@given(sizes_that_run, st.data())
def test_uneven_stages_take_at_least_as_long_as_the_slowest_one(sizes: Sizes, data: st.DataObject) -> None:
    _, ranks, stages_per_rank, microbatches = sizes
    costs = data.draw(st.lists(seconds, min_size=ranks * stages_per_rank, max_size=ranks * stages_per_rank))
    result = timeline(pipeline_order(*sizes), lambda action: costs[action.stage], no_transfer_time)
    assert result.span_s >= 2 * microbatches * max(costs) * (1 - 1e-9)


def test_a_slow_stage_delays_the_others() -> None:
    result = timeline(pipeline_order("1f1b", 2, 1, 3), lambda action: 1.0 + action.stage, no_transfer_time)
    first = [(e.kind, e.microbatch, e.start_s, e.end_s) for e in result.events() if e.rank == 0]
    assert first == [
        ("forward", 0, 0.0, 1.0),
        ("forward", 1, 1.0, 2.0),
        ("backward", 0, 5.0, 6.0),
        ("forward", 2, 6.0, 7.0),
        ("backward", 1, 9.0, 10.0),
        ("backward", 2, 13.0, 14.0),
    ]
    assert (result.span_s, result.busy_s, result.idle_s) == (14.0, (6.0, 12.0), (8.0, 2.0))


def test_neighbouring_stages_on_one_rank_need_no_transfer() -> None:
    transfers: list[tuple[int, int]] = []

    def transfer(source: int, stage: int) -> float:
        transfers.append((source, stage))
        return 1.0

    timeline(pipeline_order("zbv", 2, 2, 4), equal_costs(1.0, 1.0, 1.0), transfer)
    assert sorted(transfers) == [(0, 1), (1, 0), (2, 3), (3, 2)]


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
        timeline(order, equal_costs(1.0, 1.0), no_transfer_time)


def test_a_large_pipeline_asks_for_the_cost_of_each_stage_and_kind_once() -> None:
    calls = 0

    def cost(_: Action) -> float:
        nonlocal calls
        calls += 1
        return 1.0

    result: Timeline = timeline(pipeline_order("1f1b", 64, 1, 512), cost, no_transfer_time)
    assert calls == 64 * 2
    assert result.span_s == pipeline_span("1f1b", 64, 1, 512, 1.0, 1.0)


def test_other_schedules_have_no_closed_form() -> None:
    with pytest.raises(ValueError, match="run its timeline"):
        pipeline_span("zbv", 4, 2, 8, 1.0, 1.0)
