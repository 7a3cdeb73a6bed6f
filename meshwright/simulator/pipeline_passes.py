"""Seconds of the passes of all microbatches of a step.

one stage per rank, no pipeline   microbatches × both passes of the stage                        passes_time
pipeline                          the span of the timeline of all stages and microbatches        _pipeline_time
bubble                            span - the work of the busiest rank - what transfers add to the span
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from meshwright.simulator.communication.exchange import transfer_s
from meshwright.simulator.pipeline.order import Action, Order, PassKind, pipeline_order, stages_of_rank
from meshwright.simulator.pipeline.stages import StageProfile
from meshwright.simulator.pipeline.timeline import Timeline, timeline
from meshwright.simulator.stage_time import StageTime
from meshwright.simulator.step_inputs import StepInputs

# Share of a backward pass that computes the gradient of the stage's input, in schedules that compute it separately from
# the gradients of weights (Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241). It is a half, because
# the backward pass of a linear layer has one product for each, with equally many FLOPs.
_INPUT_GRADIENT_SHARE = 0.5


@dataclass(frozen=True)
class PassesTime:
    """The time of all passes of a step. `breakdown` has the seconds of the busiest pipeline rank. `slack_s` has, for
    each pipeline rank, the seconds between the end of the rank's own passes and the end of the last rank's. `timeline`
    is None without a pipeline."""

    breakdown: dict[str, float]
    slack_s: list[float]
    timeline: Timeline | None = None


def passes_time(times: Sequence[StageTime], stages: Sequence[StageProfile], inputs: StepInputs) -> PassesTime:
    """The time of all passes of a step. `times` has the time of one microbatch on each stage."""
    plan = inputs.plan
    if plan.axes.pipeline == 1:
        microbatches = plan.pipeline.microbatches * plan.memory.accumulation
        return PassesTime(_stages_breakdown(times, microbatches), [0.0])
    return _pipeline_time(times, stages, inputs)


def _pipeline_time(times: Sequence[StageTime], stages: Sequence[StageProfile], inputs: StepInputs) -> PassesTime:
    """Returns the time of all passes of a step from a replay of the schedule. The bubble is the span of the timeline,
    minus the work of the busiest rank, minus what transfers between stages add to the span. With gradient accumulation
    the schedule runs several times in a step, so everything is multiplied by their number."""
    plan = inputs.plan
    ranks, schedule, per_rank = plan.axes.pipeline, plan.pipeline.schedule, plan.stages_per_rank
    shape = _PipelineShape(schedule, ranks, per_rank, plan.pipeline.microbatches)
    numbers = [stages_of_rank(schedule, ranks, per_rank, rank) for rank in range(ranks)]
    transfers_s = _transfers_s(stages, numbers, inputs)
    actions = _ActionTimes(tuple(times), tuple(transfers_s), inputs.runtime.splits_backward(plan))
    span_s, span_without_transfers_s, longest = _pipeline_spans(shape, actions, inputs.runtime.waits_for_sends)
    busy_s = [sum(times[s].forward_pass_s + times[s].backward_pass_s for s in rank_stages) for rank_stages in numbers]
    breakdown = _stages_breakdown([times[s] for s in numbers[busy_s.index(max(busy_s))]], shape.microbatches)
    breakdown["pipeline"] = max(0.0, span_s - span_without_transfers_s)
    breakdown["bubble"] = span_s - sum(breakdown.values())
    breakdown = {name: seconds * plan.memory.accumulation for name, seconds in breakdown.items()}
    return PassesTime(breakdown, [longest.span_s - ends[-1] for ends in longest.ends_s], longest)


@dataclass(frozen=True)
class _ActionTimes:
    """Computes the seconds of a pipeline's actions and transfers. `times` are the times of one microbatch on each
    stage, `transfers_s` the seconds of a message from each stage to the next stage. Without `splits_backward`, an
    `input_backward` action is the whole backward pass, and nothing is left to do for `weight_backward`."""

    times: tuple[StageTime, ...]
    transfers_s: tuple[float, ...]
    splits_backward: bool

    @cached_property
    def _seconds(self) -> list[dict[PassKind, float]]:
        """The seconds of each stage's actions by their kind. They are looked up for every microbatch."""
        # The first stage sends no gradient, so its whole backward pass computes gradients of weights.
        shares = [_INPUT_GRADIENT_SHARE if stage else 0.0 for stage in range(len(self.times))]
        if not self.splits_backward:
            shares = [1.0] * len(self.times)
        return [
            {
                "forward": time.forward_pass_s,
                "backward": time.backward_pass_s,
                "input_backward": time.backward_pass_s * share,
                "weight_backward": time.backward_pass_s * (1 - share),
            }
            for time, share in zip(self.times, shares, strict=True)
        ]

    def action_s(self, action: Action) -> float:
        return self._seconds[action[0]][action[2]]

    def action_and_send_s(self, action: Action) -> float:
        """Seconds of the action and of sending its result to the stage that needs it."""
        if action.kind == "forward":
            return self.action_s(action) + self.transfers_s[action.stage]
        sends_gradient = action.stage and action.kind in ("backward", "input_backward")
        return self.action_s(action) + (self.transfers_s[action.stage - 1] if sends_gradient else 0.0)

    def transfer_s(self, source: int, target: int) -> float:
        return self.transfers_s[min(source, target)]


def _no_transfer_s(source: int, target: int) -> float:
    return 0.0


def _transfers_s(stages: Sequence[StageProfile], numbers: Sequence[Sequence[int]], inputs: StepInputs) -> list[float]:
    """For each stage, the seconds of a message to the next stage; 0 if both are on the same rank, and for the last
    stage. `numbers` has the stages of each rank. In schedules that fold the chain of stages (zbv), the next stage may
    be on the previous rank."""
    ranks = inputs.plan.axes.pipeline
    rank_of = {stage: rank for rank, rank_stages in enumerate(numbers) for stage in rank_stages}
    seconds = []
    for number, stage in enumerate(stages):
        rank, following = rank_of[number], rank_of.get(number + 1, rank_of[number])
        if rank == following:
            seconds.append(0.0)
            continue
        first = rank if following == (rank + 1) % ranks else following
        sent_bytes = stage.sent.at(inputs.batch)
        seconds.append(transfer_s(sent_bytes, inputs.plan, inputs.cluster, inputs.runtime, first))
    return seconds


def _stages_breakdown(times: Sequence[StageTime], microbatches: int) -> dict[str, float]:
    """The breakdown of the seconds of a rank with these stages, for this number of microbatches."""
    expert_s = sum(time.expert_forward_s + time.expert_backward_s for time in times) * microbatches
    context_s = sum(time.context_forward_s + time.context_backward_s for time in times) * microbatches
    return {
        **({"expert": expert_s} if expert_s else {}),
        "compute": sum(time.forward_s + time.backward_s for time in times) * microbatches,
        "launch": sum(time.launch_s for time in times) * microbatches,
        "tensor": sum(time.tensor_forward_s + time.tensor_backward_s for time in times) * microbatches,
        "pipeline": 0.0,
        "shard": sum(time.shard_s for time in times) * microbatches,
        "replicate": 0.0,
        "bubble": 0.0,
        **({"context": context_s} if context_s else {}),
    }


@dataclass(frozen=True)
class _PipelineShape:
    schedule: str
    ranks: int
    stages_per_rank: int
    microbatches: int

    def order(self, microbatches: int) -> Order:
        return pipeline_order(self.schedule, self.ranks, self.stages_per_rank, microbatches)


# Plans that the planner predicts one after the other often differ in nothing that a pass depends on.
@lru_cache(maxsize=8)
def _pipeline_spans(
    shape: _PipelineShape, actions: _ActionTimes, waits_for_sends: bool
) -> tuple[float, float, Timeline]:
    """The seconds of all microbatches, the same without transfers between stages, and the timeline with transfers (see
    `_span`)."""
    if waits_for_sends:
        span_s, longest = _span(shape, actions.action_and_send_s, _no_transfer_s)
    else:
        span_s, longest = _span(shape, actions.action_s, actions.transfer_s)
    span_without_transfers_s, _ = _span(shape, actions.action_s, _no_transfer_s)
    return span_s, span_without_transfers_s, longest


def _span(
    shape: _PipelineShape, action_s: Callable[[Action], float], transfer_s: Callable[[int, int], float]
) -> tuple[float, Timeline]:
    """The seconds of all microbatches, and the longest timeline that was computed. Once a pipeline is full, every
    further round (one microbatch per rank) takes equally long. The seconds of many microbatches are therefore
    extrapolated from two timelines with fewer microbatches, one round apart; the longer of the two is returned."""
    full = shape.ranks * (2 * shape.stages_per_rank + 2)
    rounds = (shape.microbatches - full) // shape.ranks if shape.schedule != "gpipe" else 0
    if rounds <= 2:
        whole = timeline(shape.order(shape.microbatches), action_s, transfer_s)
        return whole.span_s, whole
    first = shape.microbatches - rounds * shape.ranks
    short = timeline(shape.order(first), action_s, transfer_s)
    longer = timeline(shape.order(first + shape.ranks), action_s, transfer_s)
    return short.span_s + rounds * (longer.span_s - short.span_s), longer
