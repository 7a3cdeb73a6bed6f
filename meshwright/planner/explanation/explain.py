"""Sentences that say why the best plan was chosen and others were not, with numbers from profile and predictions."""

from meshwright.cluster.cluster import Device, Link
from meshwright.numbers.units import bytes_text, duration_text, number_text, seconds_text
from meshwright.plan import Plan
from meshwright.planner.explanation.experts import explain_experts
from meshwright.planner.explanation.host_memory import host_memory
from meshwright.planner.explanation.sequences import sequences
from meshwright.planner.explanation.terms import COMMUNICATION, term_words
from meshwright.planner.explanation.unequal import unequal
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.model_summary import ModelSummary
from meshwright.planner.preference import describe_preference
from meshwright.planner.search_result import PricedPlan, SearchResult
from meshwright.simulator.communication.placement import axis_groups
from meshwright.simulator.experts import expert_group
from meshwright.simulator.predict import Prediction
from meshwright.simulator.tensor.branches import branch_rank_profiles, plan_outside_branches
from meshwright.simulator.tensor.split_profile import replicate_split_parameters, split_profile

_NOTABLE = 0.02  # communication with at least this share of the step is explained
_NEGLIGIBLE = 5e-4  # a difference of two steps that is called none


def explain(result: SearchResult, inputs: PlanningInputs) -> list[str]:
    """Returns sentences about the best plan, the most important first."""
    best = result.ranked[0]
    sentences = [
        _headline(best, result, inputs),
        *_preference(result),
        step_shares(best.plan, best.prediction),
        *unequal(best, result.summary, inputs),
        *_memory(best, result.summary, inputs),
        *_offload(best, result),
    ]
    sentences += host_memory(best.plan, best.prediction, inputs)
    sentences += [*_wide_layers(best, result, inputs), *_branches(best, result, inputs)]
    sentences += sequences(best, result.summary)
    sentences += [*_axes(best, inputs), *_experts(best, result.summary, inputs)]
    sentences += _communication(best, inputs)
    sentences += _runner_up(best, result, inputs)
    if inputs.cluster.price_per_hour:
        sentences.append(cost(best, inputs))
    return sentences


def preference(result: SearchResult) -> str:
    """Says which faster plan the best one is preferred to, and why; empty if it is the fastest."""
    best, fastest = result.ranked[0], result.fastest
    if fastest is None or fastest is best:
        return ""
    return describe_preference(best.plan, best.prediction, (fastest.plan, fastest.prediction))


def _preference(result: SearchResult) -> list[str]:
    reason = preference(result)
    return [f"The simpler plan is preferred: {reason}."] if reason else []


def _headline(best: PricedPlan, result: SearchResult, inputs: PlanningInputs) -> str:
    superlative = "fastest" if result.fastest is None or result.fastest is best else "best"
    step_s, ranks, devices = best.prediction.step_s, best.plan.world_size, inputs.cluster.device_count
    unused = f" on {ranks} of {devices} devices (no plan over all of them is faster)" if ranks < devices else ""
    return (
        f"{best.plan.summary()}{unused} trains {inputs.global_batch} samples in {seconds_text(step_s)}"
        f" ({number_text(inputs.global_batch / step_s)} samples per second). It is the {superlative} of"
        f" {result.candidate_count:,} candidates, of which {result.priced_count} were simulated in full."
    )


def step_shares(plan: Plan, prediction: Prediction) -> str:
    """Returns a sentence with the shares of the step by term (computing, communication, ...), the largest first. They
    add up to 100%."""
    terms = sorted(prediction.breakdown.items(), key=lambda term: -term[1])
    shares = rounded_shares([value for _, value in terms], 1000)
    parts = [
        f"{share / 10:.1f}% {term_words(plan, name)} ({seconds_text(value)})"
        for (name, value), share in zip(terms, shares, strict=True)
        if share
    ]
    return f"The step is {', '.join(parts)}."


def rounded_shares(values: list[float], whole: int) -> list[int]:
    """The share of each value in parts of `whole` (100 for percent), rounded such that all shares add up to it."""
    total = sum(values) or 1.0
    exact = [whole * value / total for value in values]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(values)), key=lambda index: shares[index] - exact[index])
    for index in by_remainder[: whole - sum(shares)]:
        shares[index] += 1
    return shares


def _share(priced: PricedPlan, name: str) -> float:
    return priced.prediction.breakdown.get(name, 0.0) / priced.prediction.step_s


def _memory(best: PricedPlan, summary: ModelSummary, inputs: PlanningInputs) -> list[str]:
    """Says whether weights, gradients and optimizer state of the whole model fit on one device, and how much memory the
    plan uses."""
    trained_bytes = sum(parameter.bytes for parameter in summary.profile.parameters if parameter.trainable)
    states_bytes = summary.profile.parameter_bytes + trained_bytes * (1 + inputs.optimizer.state_ratio)
    fullest, axes = best.prediction.fullest_device or inputs.device, best.plan.axes
    memory_bytes, device = fullest.memory_bytes, fullest.name
    names = ("shard", *["context"] * (axes.shard > 1), "tensor", "pipeline", "expert")  # context ranks are shards, too
    dividing = [f"{name} {getattr(axes, name)}" for name in names if getattr(axes, name) > 1]
    if best.candidate.sizes.splits_wide_layers:
        dividing.append("splitting the wide layers")
    used = f"The plan uses {bytes_text(best.needed_bytes)} of the {bytes_text(memory_bytes)} of one {device}"
    if states_bytes > inputs.capacity_bytes:
        divided = f", so they are divided by {' × '.join(dividing)}" if dividing else ""
        return [
            f"Weights, gradients and optimizer state take {bytes_text(states_bytes)}, more than the"
            f" {bytes_text(inputs.capacity_bytes)} of one {device} that a plan may use{divided}."
            f" {used}."
        ]
    recompute = best.plan.memory.recompute
    recomputed = f", with {recompute} recomputation of activations" if recompute != "none" else ""
    whole = "would fit on one device" if dividing else "are whole on every device"
    return [f"Weights, gradients and optimizer state take {bytes_text(states_bytes)} and {whole}. {used}{recomputed}."]


def _offload(best: PricedPlan, result: SearchResult) -> list[str]:
    """Says why tensors are in CPU memory, and how much of it they need; empty if none are."""
    offload, without = best.plan.memory.offload, result.without_offload
    if offload == "none":
        return []
    tensors = "Optimizer state is" if offload == "optimizer" else "Optimizer state and shards of parameters are"
    reason = "no plan fits without that"
    if without is not None:
        longer = without.prediction.step_s / best.prediction.step_s - 1
        reason = f"the best plan without that, {without.plan.summary()}, takes {longer:.1%} longer"
    return [
        f"{tensors} in CPU memory, because {reason}. A rank needs {bytes_text(best.prediction.memory.host_bytes)}"
        " of it."
    ]


def _wide_layers(best: PricedPlan, result: SearchResult, inputs: PlanningInputs) -> list[str]:
    """For models with a few layers that have many weights and compute little, says how much time splitting them saves
    or costs; empty for other models."""
    summary = result.summary
    if summary.wide_layers is None or best.plan.axes.replicate * best.plan.axes.shard == 1:
        return []
    if best.candidate.sizes.splits_wide_layers:
        gain = ""
        replicated = next((p for p in result.family_bests if p.candidate.sizes.family == ("replicate",)), None)
        if replicated is not None:
            shorter = 1 - best.prediction.step_s / replicated.prediction.step_s
            gain = f", and the step is {shorter:.1%} shorter than with the whole model replicated"
        return [
            f"{_layer_shares(tuple(best.plan.modules.splits), summary)}. Splitting them over"
            f" {best.plan.axes.replicate} ranks saves an all-reduce of {bytes_text(_saved_bytes(best, summary))} per"
            f" step{gain}."
        ]
    split = next((p for p in result.family_bests if p.candidate.sizes.splits_wide_layers), None)
    if split is not None:
        slower = split.prediction.step_s / best.prediction.step_s - 1
        layers = _layer_shares(tuple(split.plan.modules.splits), summary)
        link = _link_of(best, "replicate", inputs)
        return [
            f"{layers}. Splitting them would make the step {slower:.1%} longer, because {_link_words(link)} combines"
            " their gradients fast enough."
        ]
    return []


def _saved_bytes(priced: PricedPlan, summary: ModelSummary) -> int:
    """The bytes of gradients that need no all-reduce because the plan splits their parameters over the replicate
    axis."""
    not_combined = replicate_split_parameters(summary.profile, priced.plan)
    return sum(parameter.bytes for parameter in summary.profile.parameters if parameter.names[0] in not_combined)


def _layer_shares(modules: tuple[str, ...], summary: ModelSummary) -> str:
    """The beginning of a sentence that states the shares of these layers in the model's weights and multiplications."""
    profile = summary.profile
    weights = sum(p.bytes for p in profile.parameters if p.names[0].rpartition(".")[0] in modules)
    flops = sum(
        operator.flops.at(1)
        for segment in profile.segments
        for operator in segment.operators
        if operator.layer in modules
    )
    flop_percent = max(1, round(flops / profile.flops(1) * 100 + 0.5))
    return (
        f"{_layer_names(modules)} hold {weights / profile.parameter_bytes:.0%} of the weights but do under"
        f" {flop_percent}% of the multiplications"
    )


def _layer_names(modules: tuple[str, ...]) -> str:
    return f"The layer {modules[0]}" if len(modules) == 1 else f"The fully connected layers {', '.join(modules)}"


def _branches(best: PricedPlan, result: SearchResult, inputs: PlanningInputs) -> list[str]:
    """For models with towers or heads, says what placing them on different ranks saves and costs; empty if no such plan
    was simulated."""
    plans = (*result.ranked, *result.family_bests)
    fitting = [priced for priced in plans if inputs.fits(priced.prediction)]
    placed = [priced for priced in fitting if priced.candidate.sizes.placed_branches]
    placed = placed or [priced for priced in plans if priced.candidate.sizes.placed_branches]
    if not placed:
        return []
    if not best.candidate.sizes.placed_branches:
        other = min(placed, key=lambda priced: priced.prediction.step_s)
        is_slower = "is " if other in fitting else ""
        kind, ranks = other.candidate.sizes.placed_branches, other.plan.axes.tensor
        return [
            f"With the {kind} on {ranks} ranks of a node ({_branch_names(other)}; {other.plan.summary()})"
            f" {_branch_weights(other, result.summary)}, but that {is_slower}{reason(other, best, inputs)}."
        ]
    kind, ranks = best.candidate.sizes.placed_branches, best.plan.axes.tensor
    sentences = [
        f"The {kind} are placed on {ranks} ranks of a node ({_branch_names(best)}):"
        f" {_branch_weights(best, result.summary)}, and {_term_cost(best, 'tensor')}."
    ]
    not_placed = [priced for priced in fitting if not priced.candidate.sizes.placed_branches]
    if not_placed:
        other = min(not_placed, key=lambda priced: priced.prediction.step_s)
        shorter = 1 - best.prediction.step_s / other.prediction.step_s
        sentences.append(
            f"The step is {shorter:.1%} shorter than that of the best plan which does not place them,"
            f" {other.plan.summary()}, which is {reason(other, best, inputs)}."
        )
    return sentences


def _branch_names(priced: PricedPlan) -> str:
    """The names of the branches on every rank, such as `document | query`."""
    ranks = priced.plan.modules.branches
    by_rank = [[name for name, rank in ranks.items() if rank == number] for number in range(priced.plan.axes.tensor)]
    return " | ".join(", ".join(names) for names in by_rank)


def _branch_weights(priced: PricedPlan, summary: ModelSummary) -> str:
    profile = summary.profile
    shared = plan_outside_branches(profile, priced.plan)
    most = max(split_profile(rank, shared).parameter_bytes for rank in branch_rank_profiles(profile, priced.plan))
    total = profile.parameter_bytes
    return f"a rank trains and combines {bytes_text(most)} of {bytes_text(total)} of weights"


def _axes(best: PricedPlan, inputs: PlanningInputs) -> list[str]:
    axes, sentences = best.plan.axes, []
    if axes.tensor > 1 and not best.candidate.sizes.placed_branches:
        link = _link_of(best, "tensor", inputs)
        sentences.append(
            f"Tensor {axes.tensor} stays within a node, on {_link_words(link)}: {_term_cost(best, 'tensor')}."
        )
    if axes.pipeline > 1:
        pipeline = best.plan.pipeline
        stages = len(pipeline.cuts) + 1
        sentences.append(
            f"Pipeline {axes.pipeline} runs {pipeline.microbatches} microbatches of {best.prediction.batch_per_rank}"
            f" samples through {stages} stages ({pipeline.schedule}): {_term_cost(best, 'bubble')}, and over"
            f" {_link_words(_link_of(best, 'pipeline', inputs))} {_term_cost(best, 'pipeline')}."
        )
    return sentences


def _experts(best: PricedPlan, summary: ModelSummary, inputs: PlanningInputs) -> list[str]:
    if best.plan.axes.expert == 1:
        return []
    link = _link_words(_link_of(best, "expert", inputs))
    return [explain_experts(best, summary.profile, link, _term_cost(best, "expert"))]


def _term_cost(priced: PricedPlan, name: str) -> str:
    value = priced.prediction.breakdown.get(name, 0.0)
    return f"{term_words(priced.plan, name)} takes {seconds_text(value)}, {_share(priced, name):.1%} of the step"


def _communication(best: PricedPlan, inputs: PlanningInputs) -> list[str]:
    """Says which link costs the most time, or that communication costs almost none."""
    exposed = {name: _share(best, name) for name in COMMUNICATION}
    axis = max(exposed, key=exposed.__getitem__)
    if exposed[axis] < _NOTABLE:
        return [
            f"No link limits the step: all communication except {sum(exposed.values()):.1%} of the step overlaps with"
            " computing."
        ]
    link = _link_of(best, axis, inputs)
    return [f"The link that costs the most is {_link_words(link)}: {_term_cost(best, axis)}."]


def _link_of(priced: PricedPlan, axis: str, inputs: PlanningInputs) -> Link:
    """The slowest link that the axis uses. If wide layers are split, the term `tensor` is their communication, over the
    replicate axis."""
    cluster = inputs.cluster
    mesh_axis = "replicate" if priced.candidate.sizes.splits_wide_layers and axis == "tensor" else axis
    axes = priced.plan.axes
    group = expert_group(axes, cluster) if axis == "expert" else axis_groups(axes, cluster)[mesh_axis]
    if group.nodes > 1 and cluster.link is not None:
        return cluster.link
    return min((node.link for node in cluster.nodes), key=lambda link: link.bandwidth_bytes_per_s)


def _link_words(link: Link) -> str:
    return f"{link.name} ({link.bandwidth_bytes_per_s / 1e9:.3g} GB/s per device)"


def _runner_up(best: PricedPlan, result: SearchResult, inputs: PlanningInputs) -> list[str]:
    """Names the fastest plan of another family; empty if there is none. Plans that place branches are only compared
    with each other, because `_branches` explains the difference to other plans."""
    sizes = best.candidate.sizes
    others = [
        priced
        for priced in result.family_bests
        if priced.candidate.sizes.family != sizes.family
        and bool(priced.candidate.sizes.placed_branches) == bool(sizes.placed_branches)
        and inputs.fits(priced.prediction)
    ]
    if not others:
        return []
    other = min(others, key=lambda priced: priced.prediction.step_s)
    summary, words = other.plan.summary(), reason(other, best, inputs)
    is_faster = other.prediction.step_s < best.prediction.step_s * (1 - _NEGLIGIBLE)
    return [f"The next best kind of plan is {summary}{':' if is_faster else ','} {words}."]


def reason(priced: PricedPlan, best: PricedPlan, inputs: PlanningInputs) -> str:
    """Why a plan was not chosen: it does not fit, or it is slower. In the latter case, names the term that takes the
    most additional time."""
    if not inputs.fits(priced.prediction):
        return too_large(priced.needed_bytes, inputs, device=priced.prediction.fullest_device)
    best_terms, terms = best.prediction.breakdown, priced.prediction.breakdown
    name = max(terms, key=lambda name: terms[name] - best_terms.get(name, 0.0))
    slower = priced.prediction.step_s / best.prediction.step_s - 1
    extra_s = terms[name] - best_terms.get(name, 0.0)
    if slower < -_NEGLIGIBLE:
        return describe_preference(best.plan, best.prediction, (priced.plan, priced.prediction))
    if slower < _NEGLIGIBLE:
        return "as fast"
    is_axis = name in axis_groups(priced.plan.axes, inputs.cluster)
    link = f" over {_link_words(_link_of(priced, name, inputs))}" if is_axis else ""
    words = term_words(priced.plan, name)
    return f"{slower:.1%} slower: {words}{link} takes {seconds_text(terms[name])}, {seconds_text(extra_s)} more"


def too_large(needed: float, inputs: PlanningInputs, at_least: bool = False, device: Device | None = None) -> str:
    device = device or inputs.device
    capacity = bytes_text(inputs.capacity_of(device))
    words = f"needs {'at least ' if at_least else ''}{bytes_text(needed)}"
    return f"{words}, more than the {capacity} of one {device.name} that a plan may use"


def cost(priced: PricedPlan, inputs: PlanningInputs) -> str:
    """A sentence with the price of an epoch if its length is known, otherwise of a thousand steps."""
    price = inputs.cluster.price_per_hour
    assert price is not None
    steps, words = 1000.0, "1,000 steps cost {} and take {}"
    if inputs.epoch_samples is not None:
        steps = -(-inputs.epoch_samples // inputs.global_batch)
        words = f"an epoch of {inputs.epoch_samples:,} samples costs {{}} and takes {{}}"
    length_s = steps * priced.prediction.step_s
    cost = words.format(number_text(price * length_s / 3600), duration_text(length_s))
    return f"At {number_text(price)} per hour, {cost}."
