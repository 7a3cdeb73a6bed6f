"""How a plan divides a batch and a model among machines that are not alike. Of each candidate, the even division and
the division by speed are predicted, and the better one is kept (preference.py).

    shares      samples of each data rank, by the predicted time as a function of them             with_best_shares
    cuts        pieces of each pipeline stage, by the speed of the devices that hold it            with_cuts_by_speed
    shards      weights, gradients and optimizer state of each shard rank: evenly or, where that does not fit, by the
                memory of the devices                                                     with_shards_by_memory
    groups      ranks that compute together (tensor and context axes) have equal devices           candidates.py
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from pydantic import ValidationError

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.planner.compute_variants import Predict, plan_that_fits
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.model_summary import ModelSummary
from meshwright.planner.preference import PredictedPlan
from meshwright.planner.unequal.cuts import balanced_by_speed
from meshwright.planner.unequal.shards import with_shards_by_memory
from meshwright.planner.unequal.shares import ShareGroup, best_shares
from meshwright.profile.values import ModelProfile
from meshwright.simulator.data_ranks import DataRankGroup, data_rank_groups
from meshwright.simulator.pipeline.order import stages_of_rank
from meshwright.simulator.predict import GroupPrediction, Prediction, group_memory, group_step
from meshwright.simulator.step_inputs import slowest_node

_SHARES, _CUTS = "shares.samples", "pipeline.cuts"


def divided(
    plan: Plan, inputs: PlanningInputs, predict: Predict, profile: ModelProfile, summary: ModelSummary
) -> tuple[PredictedPlan, PredictedPlan | None]:
    """Returns the plan with the best division and its prediction; and the even division with its prediction, if that
    is another one. `plan` divides batch and model evenly, unless constraints fix its shares or cuts."""
    even = plan_that_fits(plan, inputs, predict, profile)
    if inputs.cluster.is_uniform:
        return even, None
    options = [even]
    for by_speed in _by_speed(plan, even, inputs, profile, summary):
        if not _can_run(by_speed, inputs):
            continue
        options.append((by_speed, predict(by_speed)))
        again = _cut_again(options[-1], inputs, summary)
        if again != by_speed:
            options.append((again, predict(again)))
    if not inputs.fits(even[1]):
        with_even_shares = [option for option, _ in options if option.shares == plan.shares]
        by_memory = [option for option in _by_memory(with_even_shares, inputs, profile) if _can_run(option, inputs)]
        options += [(option, predict(option)) for option in by_memory]
    fitting = [option for option in options if inputs.fits(option[1])]
    if not fitting:
        return even, None
    best = min(fitting, key=lambda option: option[1].step_s)
    return best, even if best is not even else None


def _can_run(plan: Plan, inputs: PlanningInputs) -> bool:
    """Whether a run can divide the batch unequally under this plan."""
    return _why_not(plan, inputs) is None


def why_no_shares(plan: Plan, inputs: PlanningInputs) -> str | None:
    """Returns why no run can divide a batch unequally under this plan, which divides it evenly; None if one can."""
    return _why_not(_with_samples(plan, (2, *(1,) * (plan.data_ranks - 1))), inputs)


def _why_not(plan: Plan, inputs: PlanningInputs) -> str | None:
    try:
        Plan.model_validate(plan.model_dump())
        inputs.check_plan(plan)
    except InputError as error:
        return str(error)
    except ValidationError as error:
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    return None


def _by_speed(
    plan: Plan, even: PredictedPlan, inputs: PlanningInputs, profile: ModelProfile, summary: ModelSummary
) -> Iterator[Plan]:
    """Yields the plan with cuts and shares by speed. `even` is the plan and its prediction, with a loss in chunks if it
    does not fit without."""
    even_plan, prediction = even
    cut = with_cuts_by_speed(plan, inputs, summary)
    if cut != plan:
        yield cut
    for base in (plan, cut) if cut != plan else (plan,):
        shared = with_best_shares(base, inputs, profile, prediction if base == even_plan else None)
        if shared is None and even_plan != plan:
            shared = with_best_shares(even_plan, inputs, profile, prediction)
        if shared is not None and shared.shares.samples:
            yield shared


def _by_memory(plans: Sequence[Plan], inputs: PlanningInputs, profile: ModelProfile) -> Iterator[Plan]:
    """Yields the plans with shards by memory; and with the shares that are best then."""
    for plan in plans:
        sharded = with_shards_by_memory(plan, inputs, profile)
        if sharded is None:
            continue
        yield sharded
        shared = with_best_shares(sharded, inputs, profile)
        if shared is not None and shared != sharded:
            yield shared


def with_best_shares(
    plan: Plan, inputs: PlanningInputs, profile: ModelProfile, known: Prediction | None = None
) -> Plan | None:
    """Returns the plan with the shares with which its slowest rank is as fast as possible. None if it does not fit with
    any. The plan is unchanged if its data ranks are alike, or if constraints decide on its shares. `known` is the
    prediction of the plan, if there is one."""
    if _SHARES in inputs.constraints.fixed:
        return plan
    even = _with_samples(plan, ())
    groups = data_rank_groups(inputs.cluster, even, inputs.global_batch)
    if len(groups) == 1:
        return plan
    known_groups = {group.group.ranks: group for group in known.groups} if known is not None else {}
    share_groups = [_share_group(group, even, inputs, profile, known_groups.get(group.ranks)) for group in groups]
    near = [max(plan.shares.samples[rank] for rank in group.ranks) for group in groups] if plan.shares.samples else ()
    found = best_shares(inputs.global_batch, share_groups, plan.microbatches, near)
    if found is None:
        return None
    of_ranks = {
        rank: samples
        for group, shares in zip(groups, found, strict=True)
        for rank, samples in zip(group.ranks, shares, strict=True)
    }
    samples = tuple(of_ranks[rank] for rank in range(plan.data_ranks))
    return even if len(set(samples)) == 1 else _with_samples(plan, samples)


def _with_samples(plan: Plan, samples: tuple[int, ...]) -> Plan:
    return plan.model_copy(update={"shares": plan.shares.model_copy(update={"samples": samples})})


def _share_group(
    group: DataRankGroup, plan: Plan, inputs: PlanningInputs, profile: ModelProfile, known: GroupPrediction | None
) -> ShareGroup:
    arguments = (inputs.cluster, profile, plan)
    capacities = [inputs.capacity_of(node.device) for node in group.nodes]

    def step_s(samples: int) -> float:
        if known is not None and samples == known.group.samples:
            return known.step.step_s
        return group_step(*arguments, replace(group, samples=samples), inputs.optimizer, inputs.runtime).step_s

    def fits(samples: int) -> bool:
        if known is not None:  # memory grows at most in proportion to the samples, because weights do not grow
            times = max(
                1.0, replace(group, samples=samples).microbatch_samples(plan) / known.group.microbatch_samples(plan)
            )
            needed = [times * memory.device_bytes for memory in known.memory]
            if all(size <= capacity for size, capacity in zip(needed, capacities, strict=True)):
                return True
        memory = group_memory(*arguments, replace(group, samples=samples), inputs.optimizer, inputs.runtime)
        return all(rank.device_bytes <= capacity for rank, capacity in zip(memory, capacities, strict=True))

    return ShareGroup(len(group.ranks), step_s, fits)


def _cut_again(predicted: PredictedPlan, inputs: PlanningInputs, summary: ModelSummary) -> Plan:
    """Returns the plan with cuts by the predicted time of its ranks, which includes what the devices do not speed up:
    messages and launches."""
    plan, prediction = predicted
    if prediction.timeline is None:
        return plan
    return with_cuts_by_speed(plan, inputs, summary, prediction.timeline.busy_s)


def with_cuts_by_speed(plan: Plan, inputs: PlanningInputs, summary: ModelSummary, busy_s: Sequence[float] = ()) -> Plan:
    """Returns the plan with cuts with which the slowest stage is as fast as possible on the devices that hold the
    stages. It is unchanged without a pipeline, if all stages lie on equal devices, and if constraints fix the cuts.
    `busy_s` are the seconds that each pipeline rank is busy with the present cuts; if they are given, the costs of a
    piece on a kind of device are scaled such that those of all its ranks add up to them."""
    ranks, per_rank = plan.axes.pipeline, plan.stages_per_rank
    if ranks == 1 or _CUTS in inputs.constraints.fixed:
        return plan
    groups = data_rank_groups(inputs.cluster, plan, inputs.global_batch)
    nodes = [slowest_node([group.nodes[rank] for group in groups], plan) for rank in range(ranks)]
    kinds = list({id(node): node for node in nodes}.values())
    if len(kinds) == 1:
        return plan
    stages = [0] * (ranks * per_rank)
    for rank, node in enumerate(nodes):
        for stage in stages_of_rank(plan.pipeline.schedule, ranks, per_rank, rank):
            stages[stage] = next(index for index, kind in enumerate(kinds) if kind is node)
    batch = inputs.global_batch / plan.batch_parts
    costs = [summary.on(kind).piece_costs(plan.memory.recompute, batch) for kind in kinds]
    if busy_s:
        costs = _scaled(costs, busy_s, plan, stages, summary)
    cuts = balanced_by_speed(costs, [piece.cuttable for piece in summary.pieces], stages)
    if cuts is None:
        return plan
    names = tuple(summary.pieces[piece].name for piece in cuts)
    return plan.model_copy(update={"pipeline": plan.pipeline.model_copy(update={"cuts": names})})


def _scaled(
    costs: list[list[float]], busy_s: Sequence[float], plan: Plan, stages: Sequence[int], summary: ModelSummary
) -> list[list[float]]:
    """The costs of pieces by kind of device, in proportion to the seconds that the ranks of the kind are busy."""
    index = {piece.name: number for number, piece in enumerate(summary.pieces)}
    edges = [0, *(index[name] + 1 for name in plan.pipeline.cuts), len(index)]
    added, busy = [0.0] * len(costs), [0.0] * len(costs)
    for kind, (begin, end) in zip(stages, pairwise(edges), strict=True):
        added[kind] += sum(costs[kind][begin:end])
    for rank, seconds in enumerate(busy_s):
        first, *_ = stages_of_rank(plan.pipeline.schedule, plan.axes.pipeline, plan.stages_per_rank, rank)
        busy[stages[first]] += seconds
    return [
        [cost * of_kind / total for cost in pieces] if total else pieces
        for pieces, of_kind, total in zip(costs, busy, added, strict=True)
    ]


def slowdown(summary: ModelSummary, inputs: PlanningInputs) -> float:
    """How many times as long a step takes on all devices with shares by speed as if all were as fast as the device of
    the summary; 1 for equal devices."""
    if inputs.cluster.is_uniform:
        return 1.0
    batch = max(1, inputs.global_batch // inputs.cluster.device_count)
    fastest_s = sum(summary.piece_costs("none", batch))
    speeds = 0.0
    for node in inputs.cluster.nodes:
        seconds = sum(summary.on(node).piece_costs("none", batch))
        speeds += node.count * node.number * fastest_s / seconds
    return inputs.cluster.device_count / speeds
