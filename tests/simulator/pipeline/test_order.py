"""A pipeline's order is the one PyTorch runs, and what lives meanwhile is counted."""

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.simulator.pipeline.order import (
    Action,
    Order,
    PassKind,
    check_schedule,
    pipeline_order,
    stages_of_rank,
)


class InFlight(NamedTuple):
    """The largest number of microbatches at once whose activations are kept (forward begun, input backward not done),
    and of which a part is kept for the weights (input backward done, weight backward not)."""

    activations: int
    for_weights: int


def in_flight(order: Order) -> dict[int, InFlight]:
    """By stage, the microbatches in flight."""
    stages = {action.stage for actions in order for action in actions}
    live, kept = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    most_live, most_kept = dict(live), dict(kept)
    for actions in order:
        for stage, _, kind in actions:
            if kind == "forward":
                live[stage] += 1
                most_live[stage] = max(most_live[stage], live[stage])
            elif kind == "weight_backward":
                kept[stage] -= 1
            else:
                live[stage] -= 1
                if kind == "input_backward":
                    kept[stage] += 1
                    most_kept[stage] = max(most_kept[stage], kept[stage])
    return {stage: InFlight(most_live[stage], most_kept[stage]) for stage in sorted(stages)}


def most_held(
    actions: Sequence[Action], activations: Callable[[int], float], for_weights: Callable[[int], float]
) -> float:
    """The most that one rank keeps at once, given what a microbatch's activations of a stage take, and the part of
    them that is kept for the gradients of the weights."""
    kept = most = 0.0
    for stage, _, kind in actions:
        if kind == "forward":
            kept += activations(stage)
        elif kind == "weight_backward":
            kept -= for_weights(stage)
        else:
            kept -= activations(stage)
            if kind == "input_backward":
                kept += for_weights(stage)
        most = max(most, kept)
    return most


SINGLE = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
MULTI = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
KINDS: dict[Any, PassKind] = {
    torch_schedules.FORWARD: "forward",
    torch_schedules.FULL_BACKWARD: "backward",
    torch_schedules.BACKWARD_INPUT: "input_backward",
    torch_schedules.BACKWARD_WEIGHT: "weight_backward",
}
Sizes = tuple[str, int, int, int]


class RecordingStage(SimpleNamespace):
    """A stage without model or peers that notes what a schedule's step asks of it."""

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.actions.append(Action(self.stage_index, microbatch, "forward"))

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.actions.append(Action(self.stage_index, microbatch, "backward"))

    def perform_reduce_grad(self, _: int) -> None: ...

    def release_fwd_send_outputs(self, *_: Any) -> None:
        """Since torch 2.15 a schedule tells a stage when what it sent may be freed."""

    def get_fwd_recv_ops(self, _: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops


def stage(ranks: int, stages: int, rank: int, index: int) -> RecordingStage:
    last = index == stages - 1
    return RecordingStage(
        group_size=ranks, group_rank=rank, num_stages=stages, stage_index=index, is_last=last, submod=None, actions=[]
    )


def torch_order(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> Order:
    """What PyTorch runs: of single-stage schedules the step itself is run, the others are lists that it walks."""
    stages = ranks * stages_per_rank
    if schedule in SINGLE:
        alone = [stage(ranks, stages, rank, rank) for rank in range(ranks)]
        for one in alone:
            made: Any = getattr(torch_schedules, SINGLE[schedule])(one, microbatches)
            made._initialize_stage = lambda *_: None
            made._step_microbatches()
        return tuple(tuple(one.actions) for one in alone)
    local = [stage(ranks, stages, 0, index) for index in range(stages_per_rank)]
    made = getattr(torch_schedules, MULTI[schedule])(local, microbatches)
    lists = [made.pipeline_order_with_comms[rank] for rank in range(ranks)]
    return tuple(
        tuple(Action(a.stage_index, a.microbatch_index, KINDS[a.computation_type]) for a in each if a.is_compute_op)
        for each in lists
    )


def allowed(sizes: Sizes) -> bool:
    try:
        check_schedule(*sizes)
    except InputError:
        return False
    return True


any_sizes = st.tuples(st.sampled_from([*SINGLE, *MULTI]), st.integers(1, 8), st.integers(1, 3), st.integers(1, 24))
sizes_that_run = any_sizes.map(
    lambda sizes: (sizes[0], sizes[1], {"gpipe": 1, "1f1b": 1, "zbv": 2}.get(sizes[0], sizes[2]), sizes[3])
).filter(allowed)


@pytest.mark.parametrize(
    "sizes",
    [
        ("gpipe", 4, 1, 3),
        ("1f1b", 4, 1, 4),
        ("1f1b", 4, 1, 11),
        ("interleaved_1f1b", 4, 2, 16),
        ("interleaved_1f1b", 4, 3, 10),  # two rounds of five
        ("interleaved_1f1b", 8, 2, 3),
        ("zero_bubble", 4, 1, 8),
        ("zero_bubble", 4, 2, 10),
        ("zbv", 4, 2, 2),
        ("zbv", 4, 2, 13),
    ],
)
def test_the_order_is_what_pytorch_runs(sizes: Sizes) -> None:
    assert pipeline_order(*sizes) == torch_order(*sizes)


@settings(max_examples=120, deadline=None)
@given(any_sizes)
def test_what_pytorch_refuses_is_refused_and_all_else_is_its_order(sizes: Sizes) -> None:
    schedule, _, stages_per_rank, _ = sizes
    if schedule in SINGLE and stages_per_rank > 1:
        return  # there PyTorch takes a rank for a stage and says nothing
    try:
        expected = torch_order(*sizes)
    except ValueError:
        with pytest.raises(InputError):
            pipeline_order(*sizes)
    else:
        assert pipeline_order(*sizes) == expected


@settings(max_examples=60, deadline=None)
@given(sizes_that_run)
def test_each_microbatch_passes_each_stage_once(sizes: Sizes) -> None:
    schedule, ranks, stages_per_rank, microbatches = sizes
    for rank, actions in enumerate(pipeline_order(*sizes)):
        stages = stages_of_rank(schedule, ranks, stages_per_rank, rank)
        passes: dict[tuple[int, int], list[str]] = {}
        for action in actions:
            passes.setdefault((action.stage, action.microbatch), []).append(action.kind)
        assert passes.keys() == {(s, m) for s in stages for m in range(microbatches)}
        split = ["forward", "input_backward", "weight_backward"]
        expected = split if schedule in ("zero_bubble", "zbv") else ["forward", "backward"]
        assert all(found == expected for found in passes.values())


def test_stages_lie_in_rounds_or_in_a_v() -> None:
    assert [stages_of_rank("interleaved_1f1b", 3, 2, rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert [stages_of_rank("zbv", 3, 2, rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [stages_of_rank("1f1b", 2, 1, rank) for rank in range(2)] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (("1f1b", 4, 1, 3), "choose microbatches >= 4, or gpipe"),
        (("1f1b", 4, 2, 8), "1f1b runs 1 stage a rank, not 2: choose cuts that make 4 stages"),
        (("zbv", 4, 1, 8), "zbv runs 2 stages a rank, not 1: choose cuts that make 8 stages"),
        (("interleaved_1f1b", 4, 2, 14), "in 3 rounds, which do not divide them: choose microbatches 12 or 16"),
        (("zero_bubble", 4, 1, 9), "choose microbatches 8 or 12"),
        (("1f1bb", 4, 1, 9), "did you mean '1f1b'"),
    ],
)
def test_a_refusal_says_what_to_choose(sizes: Sizes, words: str) -> None:
    with pytest.raises(InputError, match=words):
        pipeline_order(*sizes)


def test_activations_in_flight() -> None:
    ranks, microbatches = 4, 16
    assert in_flight(pipeline_order("gpipe", ranks, 1, microbatches)) == dict.fromkeys(range(4), InFlight(16, 0))
    assert in_flight(pipeline_order("1f1b", ranks, 1, microbatches)) == {r: InFlight(4 - r, 0) for r in range(4)}
    zero_bubble = in_flight(pipeline_order("zero_bubble", ranks, 1, microbatches))
    assert zero_bubble == {r: InFlight(4 - r, r + 1) for r in range(4)}


@settings(max_examples=40, deadline=None)
@given(sizes_that_run)
def test_a_rank_holds_at_most_what_its_stages_hold(sizes: Sizes) -> None:
    order = pipeline_order(*sizes)
    found = in_flight(order)
    for actions in order:
        stages = Counter(action.stage for action in actions)
        assert max(found[s].activations for s in stages) <= most_held(actions, lambda _: 1.0, lambda _: 0.0)
        at_most = sum(found[s].activations + 0.5 * found[s].for_weights for s in stages)
        assert most_held(actions, lambda _: 1.0, lambda _: 0.5) <= at_most


def test_interleaving_holds_more_at_once_but_less_than_its_stages_one_by_one() -> None:
    ranks, stages_per_rank = 4, 2
    order = pipeline_order("interleaved_1f1b", ranks, stages_per_rank, 16)
    first = most_held(order[0], lambda _: 1.0, lambda _: 0.0)
    assert first == (stages_per_rank - 1) * ranks + 2 * (ranks - 1) + 1  # those ahead, and one
    found = in_flight(order)
    assert first <= found[0].activations + found[4].activations
