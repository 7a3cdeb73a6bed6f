"""The order of a pipeline's passes is the one PyTorch runs, and microbatches in flight are counted."""

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
    """The largest number of microbatches at once whose activations are in memory (between forward and input backward),
    and of which a part is still in memory for the weights (between input backward and weight backward)."""

    activations: int
    for_weights: int


def in_flight(order: Order) -> dict[int, InFlight]:
    """Returns the microbatches in flight by stage."""
    stages = {action.stage for actions in order for action in actions}
    live, for_weights = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    most_live, most_for_weights = dict(live), dict(for_weights)
    for actions in order:
        for stage, _, kind in actions:
            if kind == "forward":
                live[stage] += 1
                most_live[stage] = max(most_live[stage], live[stage])
            elif kind == "weight_backward":
                for_weights[stage] -= 1
            else:
                live[stage] -= 1
                if kind == "input_backward":
                    for_weights[stage] += 1
                    most_for_weights[stage] = max(most_for_weights[stage], for_weights[stage])
    return {stage: InFlight(most_live[stage], most_for_weights[stage]) for stage in sorted(stages)}


def peak_size(
    actions: Sequence[Action], activations: Callable[[int], float], for_weights: Callable[[int], float]
) -> float:
    """Returns the largest total size that one rank has in memory. `activations` returns the size of a microbatch's
    activations of a stage, `for_weights` the part of them that the gradients of the weights need."""
    size = peak = 0.0
    for stage, _, kind in actions:
        if kind == "forward":
            size += activations(stage)
        elif kind == "weight_backward":
            size -= for_weights(stage)
        else:
            size -= activations(stage)
            if kind == "input_backward":
                size += for_weights(stage)
        peak = max(peak, size)
    return peak


SINGLE_STAGE = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
MULTI_STAGE = {
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
    """A stage without model or peers that records the passes a schedule runs on it."""

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.actions.append(Action(self.stage_index, microbatch, "forward"))

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.actions.append(Action(self.stage_index, microbatch, "backward"))

    def perform_reduce_grad(self, _: int) -> None: ...

    def release_fwd_send_outputs(self, *_: Any) -> None:
        """Since torch 2.15 a schedule tells a stage when sent tensors may be freed."""

    def get_fwd_recv_ops(self, _: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops


def recording_stage(ranks: int, stages: int, rank: int, index: int) -> RecordingStage:
    last = index == stages - 1
    return RecordingStage(
        group_size=ranks, group_rank=rank, num_stages=stages, stage_index=index, is_last=last, submod=None, actions=[]
    )


def torch_order(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> Order:
    """Returns the order that PyTorch runs. Single-stage schedules run on recording stages; the others have lists."""
    stages = ranks * stages_per_rank
    if schedule in SINGLE_STAGE:
        recorders = [recording_stage(ranks, stages, rank, rank) for rank in range(ranks)]
        for recorder in recorders:
            torch_schedule: Any = getattr(torch_schedules, SINGLE_STAGE[schedule])(recorder, microbatches)
            torch_schedule._initialize_stage = lambda *_: None
            torch_schedule._step_microbatches()
        return tuple(tuple(recorder.actions) for recorder in recorders)
    local = [recording_stage(ranks, stages, 0, index) for index in range(stages_per_rank)]
    torch_schedule = getattr(torch_schedules, MULTI_STAGE[schedule])(local, microbatches)
    lists = [torch_schedule.pipeline_order_with_comms[rank] for rank in range(ranks)]
    return tuple(
        tuple(Action(a.stage_index, a.microbatch_index, KINDS[a.computation_type]) for a in actions if a.is_compute_op)
        for actions in lists
    )


def can_run(sizes: Sizes) -> bool:
    try:
        check_schedule(*sizes)
    except InputError:
        return False
    return True


any_sizes = st.tuples(
    st.sampled_from([*SINGLE_STAGE, *MULTI_STAGE]), st.integers(1, 8), st.integers(1, 3), st.integers(1, 24)
)
sizes_that_run = any_sizes.map(
    lambda sizes: (sizes[0], sizes[1], {"gpipe": 1, "1f1b": 1, "zbv": 2}.get(sizes[0], sizes[2]), sizes[3])
).filter(can_run)


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


@settings(max_examples=120)
@given(any_sizes)
def test_sizes_that_pytorch_refuses_are_refused_and_all_others_have_its_order(sizes: Sizes) -> None:
    schedule, _, stages_per_rank, _ = sizes
    if schedule in SINGLE_STAGE and stages_per_rank > 1:
        return  # PyTorch ignores the number of stages there
    try:
        expected = torch_order(*sizes)
    except ValueError:
        with pytest.raises(InputError):
            pipeline_order(*sizes)
    else:
        assert pipeline_order(*sizes) == expected


@settings(max_examples=60)
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
        assert all(kinds == expected for kinds in passes.values())


def test_stages_are_placed_round_robin_or_in_a_v() -> None:
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


def test_the_number_of_microbatches_in_flight_by_schedule() -> None:
    ranks, microbatches = 4, 16
    assert in_flight(pipeline_order("gpipe", ranks, 1, microbatches)) == dict.fromkeys(range(4), InFlight(16, 0))
    assert in_flight(pipeline_order("1f1b", ranks, 1, microbatches)) == {r: InFlight(4 - r, 0) for r in range(4)}
    zero_bubble = in_flight(pipeline_order("zero_bubble", ranks, 1, microbatches))
    assert zero_bubble == {r: InFlight(4 - r, r + 1) for r in range(4)}


@settings(max_examples=40)
@given(sizes_that_run)
def test_a_rank_holds_at_most_what_its_stages_hold(sizes: Sizes) -> None:
    order = pipeline_order(*sizes)
    by_stage = in_flight(order)
    for actions in order:
        stages = Counter(action.stage for action in actions)
        assert max(by_stage[s].activations for s in stages) <= peak_size(actions, lambda _: 1.0, lambda _: 0.0)
        upper_bound = sum(by_stage[s].activations + 0.5 * by_stage[s].for_weights for s in stages)
        assert peak_size(actions, lambda _: 1.0, lambda _: 0.5) <= upper_bound


def test_an_interleaved_rank_holds_less_than_the_sum_of_its_stages() -> None:
    ranks, stages_per_rank = 4, 2
    order = pipeline_order("interleaved_1f1b", ranks, stages_per_rank, 16)
    first = peak_size(order[0], lambda _: 1.0, lambda _: 0.0)
    assert first == (stages_per_rank - 1) * ranks + 2 * (ranks - 1) + 1  # the warm-up microbatches, and one
    by_stage = in_flight(order)
    assert first <= by_stage[0].activations + by_stage[4].activations
