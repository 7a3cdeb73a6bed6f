"""Sentences about plans on machines that are not alike: who gets how much, and why."""

from itertools import groupby, pairwise

from meshwright.plan import Plan
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.model_summary import ModelSummary
from meshwright.planner.preference import ERROR
from meshwright.planner.search_result import PricedPlan
from meshwright.planner.unequal.division import why_no_shares
from meshwright.planner.unequal.shards import SHARDS
from meshwright.simulator.pipeline.order import stages_of_rank
from meshwright.simulator.predict import GroupPrediction, Prediction

_WAITS = 0.05  # a group that waits for a larger share of the step is mentioned
_FULL = 0.9  # memory that is filled so far has no room for more samples
_SHARES = "shares.samples"


def unequal(best: PricedPlan, summary: ModelSummary, inputs: PlanningInputs) -> list[str]:
    """Says how the plan divides batch and model among machines that are not alike, and why; empty if all are alike."""
    if inputs.cluster.is_uniform:
        return []
    plan, prediction = best.plan, best.prediction
    longer = ""
    if best.even is not None:
        longer = f"; equal {_parts(best)} would take {best.even[1].step_s / prediction.step_s:.2g} times as long"
        if not inputs.fits(best.even[1]):
            longer = f"; with equal {_parts(best)} the plan would not fit"
    sentences = [_order(inputs)]
    if plan.shares.samples:
        sentences.append(f"{_shares(plan, prediction, inputs)}{longer}.")
    elif best.even is not None and plan.pipeline.cuts != best.even[0].pipeline.cuts:
        sentences.append(f"{_stages(best, summary)}{longer}.")
    elif plan.data_ranks > 1:
        sentences.append(_even(best, inputs))
    if plan.shares.shards:
        sentences.append(_shards(best, inputs))
    elif plan.axes.shard > 1 and len(_kinds(prediction)) > 1:
        sentences.append(
            f"Every rank of the shard axis holds an equal part of the state, so that the smallest device, the"
            f" {inputs.device.name}, decides how much of it fits."
        )
    return sentences


def shares_sentence(plan: Plan, prediction: Prediction) -> list[str]:
    """Says how many samples each kind of rank gets under a plan that the user gave, and how long they take; empty if
    all ranks are alike."""
    if len(prediction.groups) < 2:
        return []
    words = [
        f"{name} ranks get {_samples(groups, plan)} samples and would take"
        f" {max(group.step.step_s for group in groups) * 1e3:.4g} ms alone"
        for name, groups in _kinds(prediction)
    ]
    return [f"{', '.join(words)}: the slowest decide."]


def _parts(best: PricedPlan) -> str:
    assert best.even is not None
    has_other_cuts = best.plan.pipeline.cuts != best.even[0].pipeline.cuts
    words = ["shares"] * bool(best.plan.shares.samples) + ["stages"] * has_other_cuts
    words += ["shards"] * bool(best.plan.shares.shards)
    return " and ".join(words)


def _order(inputs: PlanningInputs) -> str:
    """Which ranks lie on which devices."""
    words, first = [], 0
    for name, nodes in groupby(inputs.cluster.nodes, key=lambda node: node.device.name):
        ranks = sum(node.count * node.number for node in nodes)
        which = f"rank {first} is" if ranks == 1 else f"ranks {first} to {first + ranks - 1} are"
        words.append(f"{which} on {name}")
        first += ranks
    text = ", ".join(words)
    return f"{text[0].upper()}{text[1:]}: start the machines in this order."


def _kinds(prediction: Prediction) -> list[tuple[str, list[GroupPrediction]]]:
    """The groups of data ranks on equal devices, and the name of the devices."""
    by_nodes: dict[tuple[int, ...], list[GroupPrediction]] = {}
    for group in prediction.groups:
        by_nodes.setdefault(tuple(id(node) for node in group.group.nodes), []).append(group)
    kinds = list(by_nodes.values())
    names = [groups[0].group.devices for groups in kinds]
    if len(set(names)) < len(names):  # devices of one name that are not equally fast
        names = [f"{name} ({groups[0].group.numbers})" for name, groups in zip(names, kinds, strict=True)]
    return list(zip(names, kinds, strict=True))


def _shares(plan: Plan, prediction: Prediction, inputs: PlanningInputs) -> str:
    """Such as `A100-40GB ranks get 46 samples and V100-16GB ranks 18, because A100-40GB trains 2.5 times as many
    samples per second as V100-16GB`."""
    kinds = _kinds(prediction)
    words = [f"{name} ranks {_samples(groups, plan)}" for name, groups in kinds]
    words[0] = f"{kinds[0][0]} ranks get {_samples(kinds[0][1], plan)} samples"
    joined = f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
    if limited := _limited(kinds, prediction, inputs):
        return f"{joined}, because {limited}"
    if _SHARES in inputs.constraints.fixed:
        return f"{joined}, as the constraints say"
    speeds = [max(group.group.samples / group.step.step_s for group in groups) for _, groups in kinds]
    slowest = speeds.index(min(speeds))
    faster = [
        f"{name} trains {speed / speeds[slowest]:.3g} times as many samples per second as {kinds[slowest][0]}"
        for index, ((name, _), speed) in enumerate(zip(kinds, speeds, strict=True))
        if index != slowest
    ]
    return joined + (f", because {', and '.join(faster)}" if faster else "")


def _limited(
    kinds: list[tuple[str, list[GroupPrediction]]], prediction: Prediction, inputs: PlanningInputs
) -> str | None:
    """Names the ranks whose memory has no room for more samples, and which therefore wait for others."""
    for name, groups in kinds:
        waits = 1 - max(group.step.step_s for group in groups) / prediction.step_s
        memory, device = groups[0].fullest
        if waits >= _WAITS and memory.device_bytes > _FULL * inputs.capacity_of(device):
            return f"more samples would not fit into the memory of {name} ranks, which wait {waits:.0%} of the step"
    return None


def _samples(groups: list[GroupPrediction], plan: Plan) -> str:
    """Such as `46`, or `46 or 45`."""
    given = plan.shares.samples
    numbers = {given[rank] for group in groups for rank in group.group.ranks} if given else set()
    most = max(group.group.samples for group in groups)
    if len(numbers) > 2 or most not in numbers:  # the batch is another one than that of the shares
        numbers = {round(most)}
    return " or ".join(str(number) for number in sorted(numbers, reverse=True))


def _stages(best: PricedPlan, summary: ModelSummary) -> str:
    """Such as `The stages on A100-80GB hold 18 of the model's 26 pieces and those on V100-16GB 8, ...`."""
    plan, pieces = best.plan, len(summary.pieces)
    index = {piece.name: number for number, piece in enumerate(summary.pieces)}
    edges = [0, *(index[name] + 1 for name in plan.pipeline.cuts), pieces]
    sizes = [end - begin for begin, end in pairwise(edges)]
    held: dict[str, int] = {}
    for rank, node in enumerate(best.prediction.groups[0].group.nodes):
        stages = stages_of_rank(plan.pipeline.schedule, plan.axes.pipeline, plan.stages_per_rank, rank)
        held[node.device.name] = held.get(node.device.name, 0) + sum(sizes[stage] for stage in stages)
    (first, count), *others = held.items()
    words = [f"The stages on {first} hold {count} of the {pieces} pieces of the model"]
    words += [f"those on {name} {number}" for name, number in others]
    return f"{' and '.join(words)}, because stages are cut by the speed of the devices that hold them"


def _shards(best: PricedPlan, inputs: PlanningInputs) -> str:
    """Such as `A100-80GB ranks hold 4.2% of weights, gradients and optimizer state each and A100-40GB ranks 2.1%,
    because equal shards would not fit into the memory of the A100-40GB.`"""
    parts = {
        name: " or ".join(f"{part:.2g}%" for part in sorted({100 * (group.group.shard_part or 0) for group in groups}))
        for name, groups in _kinds(best.prediction)
    }
    (first, part), *others = parts.items()
    words = [f"{first} ranks hold {part} of weights, gradients and optimizer state each"]
    words += [f"{name} ranks {of_name}" for name, of_name in others]
    reason = "as the constraints say"
    if SHARDS not in inputs.constraints.fixed:
        reason = f"because equal shards would not fit into the memory of the {inputs.device.name}"
    return f"{' and '.join(words)}, {reason}."


def _even(best: PricedPlan, inputs: PlanningInputs) -> str:
    groups = best.prediction.groups
    if len(groups) == 1:
        return "All data ranks are alike, and get equal shares of a batch."
    if _SHARES in inputs.constraints.fixed:
        return "All data ranks get equal shares of a batch, as the constraints say; the slowest decides."
    reason = why_no_shares(best.plan, inputs)
    if reason is not None:
        return f"All data ranks get equal shares of a batch, because others could not be run: {reason}."
    return (
        "All data ranks get equal shares of a batch, because with shares by speed the step would not be shorter by more"
        f" than the error of predictions ({ERROR:.0%} of the time that differs)."
    )
