"""Why the winner wins and the others do not, in plain words and with numbers from the profile and the predictions."""

from meshwright.cluster.cluster import Link
from meshwright.planner.outline import Outline
from meshwright.planner.question import Question
from meshwright.planner.search import Choice, Found
from meshwright.simulator.communication.placement import place
from meshwright.simulator.tensor.branches import around, held
from meshwright.simulator.tensor.split_profile import kept_out, split_profile

_GIB = 2**30
_NOTABLE = 0.02  # of a step, from which a part of it is worth a word
_WHAT = {
    "compute": "computing",
    "launch": "starting operators",
    "bubble": "waiting in the pipeline",
    "optimizer": "the optimizer",
    "input": "reading input",
    "tensor": "communication of split layers",
    "pipeline": "sending between stages",
    "replicate": "combining gradients of replicas",
    "shard": "gathering and combining shards",
}

_APART = {
    "bubble": "waiting for other ranks' branches",
    "tensor": "handing on results and gradients",
}


def explain(found: Found, question: Question) -> list[str]:
    """Sentences, the most important first."""
    best = found.ranked[0]
    lines = [_headline(best, found, question), *_memory(best, found.outline, question)]
    lines += _wide(best, found, question)
    lines += _branches(best, found, question)
    lines += _axes(best, question)
    lines += _limits(best, question)
    lines += _runner_up(best, found, question)
    if question.cluster.price_per_hour:
        lines.append(cost(best, question))
    return lines


def _headline(best: Choice, found: Found, question: Question) -> str:
    step_s = best.prediction.step_s
    used = best.plan.world_size
    devices = question.cluster.devices
    idle = f" on {used} of {devices} devices (no axes over all of them suit this batch)" if used < devices else ""
    return (
        f"{best.plan.summary()}{idle} trains {question.global_batch} samples in {seconds(step_s)}"
        f" ({question.global_batch / step_s:,.4g} a second), {_share(best, 'compute'):.0%} of it computing;"
        f" {found.candidates:,} candidates, {found.priced} of them priced in full."
    )


def _what(choice: Choice, part: str) -> str:
    if choice.candidate.layout.apart and part in _APART:
        return _APART[part]
    return _WHAT[part]


def _share(choice: Choice, part: str) -> float:
    return choice.prediction.breakdown[part] / choice.prediction.step_s


def _memory(best: Choice, outline: Outline, question: Question) -> list[str]:
    """Whether one device could hold what every replica must."""
    alone = outline.profile.parameter_bytes * (2 + question.optimizer.state)
    has, device = question.device.memory_bytes, question.device.name
    axes = best.plan.axes
    dividing = [f"{name} {getattr(axes, name)}" for name in ("shard", "tensor", "pipeline") if getattr(axes, name) > 1]
    if best.candidate.layout.wide:
        dividing.append("splitting the wide layers")
    needs = f"it fills {gib(best.needs_bytes)} of the {gib(has)} of a {device}"
    if alone > question.capacity_bytes:
        return [
            f"Weights, gradients and optimizer state take {gib(alone)}, more than the {gib(has)} of a {device}: they"
            f" must be divided, here by {' × '.join(dividing)}; {needs}."
        ]
    recompute = best.plan.memory.recompute
    again = f", as activations are computed again ({recompute})" if recompute != "none" else ""
    kind = "could stay whole" if dividing else "are kept whole"
    return [f"Weights, gradients and optimizer state take {gib(alone)} and {kind}; {needs}{again}."]


def _wide(best: Choice, found: Found, question: Question) -> list[str]:
    """For few layers that hold much and compute little, what splitting them spares, or would."""
    outline = found.outline
    if outline.wide is None or best.plan.axes.replicate * best.plan.axes.shard == 1:
        return []
    if best.candidate.layout.wide:
        gain = ""
        plain = next((c for c in found.others if c.candidate.layout.family == "replicate"), None)
        if plain is not None:
            faster = 1 - best.prediction.step_s / plain.prediction.step_s
            gain = f", and the step is {faster:.1%} shorter than with all of the model replicated"
        return [
            f"{_held(tuple(best.plan.modules.splits), outline)}; splitting them over {best.plan.axes.replicate} ranks"
            f" spares an all-reduce of {_spared_bytes(best, outline) / 1e6:.0f} MB a step{gain}."
        ]
    other = next((c for c in found.others if c.candidate.layout.wide), None)
    if other is not None:
        slower = other.prediction.step_s / best.prediction.step_s - 1
        said = _held(tuple(other.plan.modules.splits), outline)
        link = _link_of(best, "replicate", question)
        return [f"{said}, but splitting them is {slower:.1%} slower: {_reach(link)} combines their gradients in time."]
    return []


def _spared_bytes(choice: Choice, outline: Outline) -> int:
    """Of gradients, that the simulator does not combine either."""
    spared = kept_out(outline.profile, choice.plan)
    return sum(parameter.bytes for parameter in outline.profile.parameters if parameter.names[0] in spared)


def _held(modules: tuple[str, ...], outline: Outline) -> str:
    """What these layers have of the weights, and of the work."""
    profile = outline.profile
    weights = sum(p.bytes for p in profile.parameters if p.names[0].rpartition(".")[0] in modules)
    work = sum(
        operator.flops.at(1)
        for stretch in profile.stretches
        for operator in stretch.operators
        if operator.layer in modules
    )
    return (
        f"{_names(modules)} hold {weights / profile.parameter_bytes:.0%} of the weights but"
        f" {_little(work / profile.flops(1))} of the multiplications"
    )


def _names(modules: tuple[str, ...]) -> str:
    return f"The layer {modules[0]}" if len(modules) == 1 else f"The fully connected layers {', '.join(modules)}"


def _little(share: float) -> str:
    return f"under {max(1, round(share * 100 + 0.5))}%"


def _branches(best: Choice, found: Found, question: Question) -> list[str]:
    """For towers or heads, what placing them on different ranks spares and takes, or would."""
    choices = (*found.ranked, *found.others)
    fitting = [choice for choice in choices if choice.needs_bytes <= question.capacity_bytes]
    placed, plain = ([c for c in fitting if bool(c.candidate.layout.apart) == apart] for apart in (True, False))
    placed = placed or [choice for choice in choices if choice.candidate.layout.apart]
    if not placed:
        return []
    one = best if best.candidate.layout.apart else min(placed, key=lambda choice: choice.prediction.step_s)
    where = one.plan.modules.branches
    ranks = [[name for name, home in where.items() if home == rank] for rank in range(one.plan.axes.tensor)]
    names = " | ".join(", ".join(own) for own in ranks)
    profile = found.outline.profile
    shared = around(profile, one.plan)
    most = max(split_profile(own, shared).parameter_bytes for own in held(profile, one.plan))
    spared = f"a rank has {most / 1e6:,.4g} of {profile.parameter_bytes / 1e6:,.4g} MB of weights to train and combine"
    kind = one.candidate.layout.apart
    if one is not best:
        said = f"With the {kind} on {len(ranks)} ranks of a node ({names}; {one.plan.summary()})"
        is_slower = "is " if one in fitting else ""
        return [f"{said} {spared}, but that {is_slower}{reason(one, best, question)}."]
    lines = [f"The {kind} live on {len(ranks)} ranks of a node ({names}): {spared}, and {_costs(one, 'tensor')}."]
    if plain:
        other = min(plain, key=lambda choice: choice.prediction.step_s)
        shorter = 1 - best.prediction.step_s / other.prediction.step_s
        lines.append(
            f"The step is {shorter:.1%} shorter than that of the best plan which does not place them,"
            f" {other.plan.summary()}: {reason(other, best, question)}."
        )
    return lines


def _axes(best: Choice, question: Question) -> list[str]:
    axes, lines = best.plan.axes, []
    if axes.tensor > 1 and not best.candidate.layout.apart:
        link = _link_of(best, "tensor", question)
        lines.append(f"Tensor {axes.tensor} stays within a node, on {_reach(link)}: {_costs(best, 'tensor')}.")
    if axes.pipeline > 1:
        shape = best.plan.pipeline
        stages = len(shape.cuts) + 1
        lines.append(
            f"Pipeline {axes.pipeline} runs {shape.microbatches} microbatches of {best.prediction.batch_per_rank}"
            f" through {stages} stages ({shape.schedule}); {_costs(best, 'bubble')}, and over"
            f" {_reach(_link_of(best, 'pipeline', question))} {_costs(best, 'pipeline')}."
        )
    return lines


def _costs(choice: Choice, part: str) -> str:
    taken = choice.prediction.breakdown[part]
    return f"{_what(choice, part)} takes {seconds(taken)}, {_share(choice, part):.1%} of the step"


def _limits(best: Choice, question: Question) -> list[str]:
    """The link that costs most."""
    exposed = {name: _share(best, name) for name in ("tensor", "pipeline", "replicate", "shard")}
    axis = max(exposed, key=exposed.__getitem__)
    if exposed[axis] < _NOTABLE:
        hidden = f"all communication but for {sum(exposed.values()):.1%} of the step runs beside computing"
        return [f"No link limits it: {hidden}."]
    link = _link_of(best, axis, question)
    return [f"What limits it is {_reach(link)}: {_costs(best, axis)}."]


def _link_of(choice: Choice, axis: str, question: Question) -> Link:
    """The slowest that the axis crosses."""
    cluster = question.cluster
    group = place(choice.plan.axes, cluster)["replicate" if choice.candidate.layout.wide and axis == "tensor" else axis]
    if group.nodes > 1 and cluster.link is not None:
        return cluster.link
    return min((node.link for node in cluster.nodes), key=lambda link: link.bandwidth_bytes_per_s)


def _reach(link: Link) -> str:
    return f"{link.name} ({link.bandwidth_bytes_per_s / 1e9:.4g} GB/s a device)"


def _runner_up(best: Choice, found: Found, question: Question) -> list[str]:
    """The fastest of another kind."""
    others = [
        choice
        for choice in found.others
        if choice.candidate.layout.family != best.candidate.layout.family
        and bool(choice.candidate.layout.apart) == bool(best.candidate.layout.apart)  # the others are told of already
        and choice.needs_bytes <= question.capacity_bytes
    ]
    if not others:
        return []
    other = min(others, key=lambda choice: choice.prediction.step_s)
    return [f"The next best kind of plan, {other.plan.summary()}, is {reason(other, best, question)}."]


def reason(choice: Choice, best: Choice, question: Question) -> str:
    """Why it was not chosen."""
    if choice.needs_bytes > question.capacity_bytes:
        return too_large(choice.needs_bytes, question)
    ours, theirs = best.prediction.breakdown, choice.prediction.breakdown
    step_s = choice.prediction.step_s
    part = max(theirs, key=lambda name: theirs[name] - ours.get(name, 0.0))
    slower = step_s / best.prediction.step_s - 1
    more = theirs[part] - ours.get(part, 0.0)
    if slower < 5e-4:
        return "as fast"
    link = (
        f" over {_reach(_link_of(choice, part, question))}" if part in place(choice.plan.axes, question.cluster) else ""
    )
    return f"{slower:.1%} slower: {_what(choice, part)}{link} takes {seconds(theirs[part])}, {seconds(more)} more"


def too_large(needs_bytes: float, question: Question, at_least: bool = False) -> str:
    return (
        f"needs {'at least ' if at_least else ''}{gib(needs_bytes)} of the {gib(question.capacity_bytes)} that may be"
        f" filled of a {question.device.name}"
    )


def cost(choice: Choice, question: Question) -> str:
    """What an epoch costs where its length is known, else a thousand steps."""
    price = question.cluster.price_per_hour
    assert price is not None
    steps, what = 1000.0, "1,000 steps"
    if question.samples is not None:
        steps, what = -(-question.samples // question.global_batch), f"an epoch of {question.samples:,} samples"
    hours = steps * choice.prediction.step_s / 3600
    return f"At {price:,.2f} an hour {what} cost {price * hours:,.2f} and take {hours:,.2f} hours."


def gib(size: float) -> str:
    return f"{size / _GIB:.3g} GiB" if size < 1000 * _GIB else f"{size / _GIB:,.0f} GiB"


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
