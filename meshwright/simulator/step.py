"""How long a step takes under a plan, and where the time goes.

    stage pass   = compute of a microbatch + adding its gradients to those before + its tensor exchange + what gathering
                   weights adds to it + what the host takes beyond all of that               _stage, _summed, _sharded
    pipeline     = the timeline of all stages and microbatches (timeline.py); without one, accumulation × both
                   passes                                                                                        _run
    gradients    = what combining them adds to the last microbatch's backward pass, and gathering weights that
                   stay whole to the first forward pass; those of weights that stages share (shared_weights.py)  _end
    step         = pipeline + gradients + optimizer                                                      _rank_step
    branches     = the slowest of the ranks that they live on, with what it waits for the others         _apart_step

The model is taken as the engine runs it (engine_profile.py), so that a rank's share of it is priced.
The breakdown is that of the busiest pipeline rank: compute, launch, tensor, pipeline, shard, replicate, bubble, input
and optimizer add up to the step. Where branches live on different ranks of the tensor axis (branches.py) it is that of
the rank that works longest, and its bubble is what it waits for the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.cluster.cluster import Cluster, Device
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.values import ModelProfile
from meshwright.simulator.communication.collectives import call_s, overlap
from meshwright.simulator.communication.exchange import gradient_exchange, messages_s, transfer_s
from meshwright.simulator.communication.placement import place
from meshwright.simulator.compute.engine_profile import padded, run_by
from meshwright.simulator.compute.operator_time import Speeds, speeds
from meshwright.simulator.compute.passes import host_s, optimizer_s, pass_s, products_in
from meshwright.simulator.engine import Engine
from meshwright.simulator.pipeline.order import Action, Order, pipeline_order, stages_of
from meshwright.simulator.pipeline.shared_weights import shared_s
from meshwright.simulator.pipeline.stages import Stage, stage_profiles
from meshwright.simulator.pipeline.timeline import Timeline, timeline
from meshwright.simulator.tensor.branches import Work, around, handed, held, is_apart, is_summed, together_s
from meshwright.simulator.tensor.messages import Message, tensor_exchange
from meshwright.simulator.tensor.split_profile import kept_out, split_profile
from meshwright.simulator.tensor.standalone_splits import with_lone

_INPUT_WEIGHT = 0.5  # of a backward pass, what the gradient of the input takes: half of its products


@dataclass(frozen=True)
class StageTime:
    """Seconds of one microbatch on one stage, by what they are spent on."""

    forward_s: float
    backward_s: float
    launch_s: float
    tensor_forward_s: float
    tensor_backward_s: float
    shard_s: float

    @property
    def into_s(self) -> float:
        return self.forward_s + self.tensor_forward_s + self.launch_s / 3 + self.shard_s / 3

    @property
    def back_s(self) -> float:
        return self.backward_s + self.tensor_backward_s + self.launch_s * 2 / 3 + self.shard_s * 2 / 3


@dataclass(frozen=True)
class StepTime:
    step_s: float
    breakdown: dict[str, float]
    timeline: Timeline | None = None


@dataclass(frozen=True)
class _Asked:
    """What a step is predicted for. `handed` is what ranks with different branches exchange in a microbatch."""

    cluster: Cluster
    plan: Plan
    batch: float
    optimizer: OptimizerCost
    engine: Engine
    device: Device
    prices: Speeds
    handed: tuple[Message, ...] = ()


def predict_step(
    cluster: Cluster, profile: ModelProfile, plan: Plan, batch: float, optimizer: OptimizerCost, engine: Engine
) -> StepTime:
    """A step in which every microbatch has `batch` samples."""
    device, prices = _rank(cluster, plan, engine)
    asked = _Asked(cluster, plan, batch, optimizer, engine, device, prices)
    run = run_by(with_lone(profile, plan), engine)
    return _apart_step(run, asked) if is_apart(plan) else _rank_step(run, asked)[0]


def _rank_step(run: ModelProfile, asked: _Asked) -> tuple[StepTime, list[StageTime]]:
    """Of a model that all ranks of the tensor axis have alike, and its stages."""
    plan, engine = asked.plan, asked.engine
    whole = stage_profiles(run, plan.pipeline.cuts)
    part = padded(split_profile(run, plan), engine)
    parts = stage_profiles(part, plan.pipeline.cuts)
    times = _stages(whole, parts, asked)
    passed, slack = _run(times, parts, asked)
    shared = shared_s(parts, plan, asked.cluster, engine)
    ends = [_end(rank, times, parts, asked, slack[rank], shared[rank]) for rank in range(plan.axes.pipeline)]
    last = max(ends, key=lambda end: end.total_s)
    breakdown = {
        **passed.breakdown,
        "pipeline": last.shared_s + passed.breakdown["pipeline"],
        "replicate": last.replicate_s,
        "shard": last.shard_s + passed.breakdown["shard"],
        "optimizer": last.optimizer_s,
        "input": engine.step_s,
    }
    return StepTime(sum(breakdown.values()), breakdown, passed.timeline), times


def _apart_step(run: ModelProfile, asked: _Asked) -> StepTime:
    """Each rank as if it were alone, and then what the one that works longest waits for the others."""
    sent = tuple(handed(run, asked.plan, asked.batch))
    shared = replace(asked, plan=around(run, asked.plan), handed=sent)
    many = asked.plan.microbatches
    found = [_rank_step(own, shared) for own in held(run, asked.plan)]
    works = [
        Work(time.into_s, time.back_s, step.step_s - many * (time.into_s + time.back_s)) for step, (time,) in found
    ]
    longest = max((step for step, _ in found), key=lambda step: step.step_s)
    step_s = together_s(works, many, summed=is_summed(sent))
    return StepTime(step_s, {**longest.breakdown, "bubble": max(0.0, step_s - longest.step_s)})


def _rank(cluster: Cluster, plan: Plan, engine: Engine) -> tuple[Device, Speeds]:
    """The slowest device there is, with the CPU cores of one rank."""
    dtype = products_in(plan.numerics.precision)
    node = min(cluster.nodes, key=lambda node: node.device.rates.get(dtype, node.device.rates.get("fp32", 0.0)))
    cores = 1
    if node.device.kind == "cpu":
        cores = plan.compute.threads or max(1, node.cores // min(plan.world_size, node.count))
    device = node.device
    if device.rates.get(dtype, 0.0) < device.rates["fp32"] and device.kind == "cuda":
        # A type that the device only emulates: libraries store it, and compute in fp32.
        device = device.model_copy(update={"rates": {**device.rates, dtype: device.rates["fp32"]}})
    return device, speeds(device, dtype, cores, plan.compute.layout, engine.tf32_images)


def _stages(whole: tuple[Stage, ...], parts: tuple[Stage, ...], asked: _Asked) -> list[StageTime]:
    """Equal stages are priced once."""
    known: dict[object, StageTime] = {}
    times = []
    for one, part in zip(whole, parts, strict=True):
        weights = sum(p.bytes for p in part.profile.parameters)
        key = (weights, *((s.phase, s.count, s.operators) for s in part.profile.stretches))
        if key not in known:
            known[key] = _stage(one.profile, part.profile, weights, asked)
        times.append(known[key])
    return times


def _stage(whole: ModelProfile, part: ModelProfile, weights: float, asked: _Asked) -> StageTime:
    plan, cluster, engine = asked.plan, asked.cluster, asked.engine
    tf32 = part.precision == "tf32"
    forward, begun = pass_s(part, "forward", asked.batch, asked.prices, tf32)
    backward, more = pass_s(part, "backward", asked.batch, asked.prices, tf32)
    backward += _summed(part, asked)
    along, wide = tensor_exchange(whole, plan, asked.batch, engine)
    along += asked.handed
    groups = place(plan.axes, cluster)
    shown = engine.communication * (1 - engine.tensor_overlaps)
    into, back = (
        shown
        * (messages_s(along, groups["tensor"], cluster, way) + messages_s(wide, groups["replicate"], cluster, way))
        for way in (True, False)
    )
    started = 0.0
    if asked.device.kind == "cuda":
        calls = sum(message.times for message in (*along, *wide))
        started = engine.launch * ((begun + more) * host_s(asked.device) + calls * call_s(cluster))
    ahead = 0.0 if engine.waits else forward + backward + into + back
    return StageTime(
        forward,
        backward,
        # The host runs ahead: it is waited for only where all that the device does is done before. A core is its own.
        max(0.0, started - ahead) + _arranging(part, (*along, *wide), asked),
        into,
        back,
        _sharded(weights, len(part.blocks), forward, backward, asked),
    )


def _summed(part: ModelProfile, asked: _Asked) -> float:
    """What adding up gradients takes a microbatch: the first one's have nothing to be added to. Where they are
    scattered after each, a rank adds up its part."""
    plan = asked.plan
    each = plan.memory.sharding != "optimizer" and plan.axes.pipeline == 1  # a pipeline scatters behind the last one
    parts = plan.axes.shard if each else 1
    weights = sum(p.bytes for p in part.parameters if p.trainable) / 4 / parts
    others = 1 - 1 / plan.microbatches
    return others * asked.engine.accumulate_bytes_per_weight * weights / asked.prices.bandwidth_bytes_per_s


def _arranging(part: ModelProfile, sent: Sequence[Message], asked: _Asked) -> float:
    """What a core spends, beside computing, on units of weights, split layers and stages in one microbatch."""
    if asked.device.kind != "cpu":
        return 0.0
    plan, work = asked.plan, asked.engine.arranging
    units = (len(part.blocks) + 1) * (plan.axes.shard > 1)
    exchanges, stages = sum(message.times for message in sent), plan.axes.pipeline > 1
    return asked.device.launch_s * (work.unit * units + work.exchange * exchanges + work.stage * stages)


def _sharded(weights: float, blocks: int, forward: float, backward: float, asked: _Asked) -> float:
    """What sharding adds to both passes of every microbatch, its first piece in each in full."""
    plan, engine = asked.plan, asked.engine
    if plan.axes.shard == 1 or plan.memory.sharding == "optimizer":
        return 0.0
    sent = gradient_exchange(weights, blocks, plan, asked.cluster, engine)
    gather = sent.gather_s if plan.memory.sharding == "parameters" else 0.0
    found = 0.0
    for compute, exchange in ((forward, gather), (backward, gather + sent.scatter_s)):
        first = exchange / sent.pieces
        found += first + overlap(compute * engine.gathers, exchange - first, asked.device.kind).exposed_s
    return found


# ---- all microbatches


def _run(times: list[StageTime], parts: tuple[Stage, ...], asked: _Asked) -> tuple[StepTime, list[float]]:
    """All passes, and how long before their end each pipeline rank is done."""
    plan = asked.plan
    rounds, many = plan.memory.accumulation, plan.pipeline.microbatches
    if plan.axes.pipeline == 1:
        breakdown = _spent(times, many * rounds)
        return StepTime(sum(breakdown.values()), breakdown), [0.0]
    ranks, schedule, stages = plan.axes.pipeline, plan.pipeline.schedule, plan.stages_per_rank
    rank_of = {stage: rank for rank in range(ranks) for stage in stages_of(schedule, ranks, stages, rank)}
    sent = [
        _sent(part, rank_of[stage], rank_of.get(stage + 1, rank_of[stage]), asked) for stage, part in enumerate(parts)
    ]

    def cost(action: Action) -> float:
        time = times[action.stage]
        if action.kind == "forward":
            return time.into_s
        if action.kind == "backward":
            return time.back_s
        # The first stage has no gradient to hand on: its whole backward pass counts for the weights.
        share = _INPUT_WEIGHT if action.stage else 0.0
        return time.back_s * (share if action.kind == "input_backward" else 1 - share)

    def waiting(action: Action) -> float:
        """Until what it makes has arrived at the other stage."""
        if action.kind == "forward":
            return cost(action) + sent[action.stage]
        hands_on = action.stage and action.kind in ("backward", "input_backward")
        return cost(action) + (sent[action.stage - 1] if hands_on else 0.0)

    def transfer(one: int, other: int) -> float:
        return sent[min(one, other)]

    def nothing(one: int, other: int) -> float:
        return 0.0

    if asked.engine.sends_wait:
        span, shown = _span(schedule, ranks, stages, many, waiting, nothing)
    else:
        span, shown = _span(schedule, ranks, stages, many, cost, transfer)
    own = [stages_of(schedule, ranks, stages, rank) for rank in range(ranks)]
    busy = [sum(times[s].into_s + times[s].back_s for s in numbers) for numbers in own]
    breakdown = _spent([times[s] for s in own[busy.index(max(busy))]], many)
    without, _ = _span(schedule, ranks, stages, many, cost, nothing)
    breakdown["pipeline"] = max(0.0, span - without)
    breakdown["bubble"] = span - sum(breakdown.values())
    passed = StepTime(span * rounds, {name: seconds * rounds for name, seconds in breakdown.items()}, shown)
    return passed, [shown.span_s - ends[-1] for ends in shown.ends_s]


def _sent(part: Stage, rank: int, following: int, asked: _Asked) -> float:
    """What a stage sends to the one behind it, on the next rank or, where a chain of stages turns, the one before."""
    if rank == following:
        return 0.0
    first = rank if following == (rank + 1) % asked.plan.axes.pipeline else following
    return transfer_s(part.sent.at(asked.batch), asked.plan, asked.cluster, asked.engine, first)


def _spent(times: list[StageTime], many: int) -> dict[str, float]:
    """Of a rank with these stages, in so many microbatches."""
    return {
        "compute": sum(time.forward_s + time.backward_s for time in times) * many,
        "launch": sum(time.launch_s for time in times) * many,
        "tensor": sum(time.tensor_forward_s + time.tensor_backward_s for time in times) * many,
        "pipeline": 0.0,
        "shard": sum(time.shard_s for time in times) * many,
        "replicate": 0.0,
        "bubble": 0.0,
    }


@lru_cache(maxsize=64)
def _order(schedule: str, ranks: int, stages: int, microbatches: int) -> Order:
    return pipeline_order(schedule, ranks, stages, microbatches)


def _span(
    schedule: str,
    ranks: int,
    stages: int,
    microbatches: int,
    cost: Callable[[Action], float],
    transfer: Callable[[int, int], float],
) -> tuple[float, Timeline]:
    """A pipeline that has been filled goes on alike: a long one is a short one and so many more rounds."""
    enough = ranks * (2 * stages + 2)
    more = (microbatches - enough) // ranks if schedule != "gpipe" else 0
    if more <= 2:
        shown = timeline(_order(schedule, ranks, stages, microbatches), cost, transfer)
        return shown.span_s, shown
    first = microbatches - more * ranks
    short = timeline(_order(schedule, ranks, stages, first), cost, transfer)
    longer = timeline(_order(schedule, ranks, stages, first + ranks), cost, transfer)
    return short.span_s + more * (longer.span_s - short.span_s), longer


# ---- behind the last microbatch


@dataclass(frozen=True)
class _End:
    """What follows a rank's passes."""

    shared_s: float
    replicate_s: float
    shard_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        return self.shared_s + self.replicate_s + self.shard_s + self.optimizer_s


def _end(
    rank: int, times: list[StageTime], parts: tuple[Stage, ...], asked: _Asked, slack_s: float, shared_s: float
) -> _End:
    """Gradients hide behind the last backward pass, all but the last bucket, which is ready only when that is done,
    and behind the passes of ranks that end later; weights that were gathered once, behind the next forward pass."""
    plan, engine, kind = asked.plan, asked.engine, asked.device.kind
    own = stages_of(plan.pipeline.schedule, plan.axes.pipeline, plan.stages_per_rank, rank)
    own = own if plan.axes.pipeline > 1 else (0,)
    trained = [p for s in own for p in parts[s].profile.parameters if p.trainable]
    alone = {name for s in own for name in kept_out(parts[s].profile, plan)}
    combined = sum(p.bytes for p in trained if p.names[0] not in alone)
    sent = gradient_exchange(combined, sum(len(parts[s].profile.blocks) for s in own), plan, asked.cluster, engine)
    once = plan.memory.sharding != "parameters"
    scatter = sent.scatter_s if plan.memory.sharding == "optimizer" else 0.0
    # A rank with several stages combines those that are done while the microbatches of a round pass the others.
    passes = plan.axes.pipeline if len(own) > 1 else 1
    backward, forward = (passes * sum(side(times[s]) for s in own) for side in (_backward, _forward))
    total = sent.replicate_s + scatter
    hidden = backward * (1 - 1 / sent.pieces) * engine.overlaps
    exposed = max(0.0, overlap(hidden, total, kind).exposed_s - slack_s) if total else 0.0
    gather = overlap(forward * engine.gathers, sent.gather_s, kind).exposed_s if once and sent.gather_s else 0.0
    size = sum(p.bytes for p in trained) / plan.axes.shard
    part = sent.replicate_s / total if total else 0.0
    return _End(
        shared_s,
        exposed * part,
        exposed * (1 - part) + gather,
        optimizer_s(size, len(trained), asked.optimizer, asked.device, asked.prices, engine.launch),
    )


def _forward(time: StageTime) -> float:
    return time.forward_s


def _backward(time: StageTime) -> float:
    return time.backward_s
