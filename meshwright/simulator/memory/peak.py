"""Predicts the memory that a rank needs: the tensors of a step, replayed in the order in which they are allocated and
freed.

    allocated = weights + buffers + inputs + optimizer state + workspace                       _permanent
              + on CPU ranks, the copy of a checkpoint that is being written                   checkpoint_copy.py
              + with a CUDA graph of the step, its copies of inputs and workspace              _permanent
              + max over the step of  gathered weights + gradients + buckets                   replay.py
                                    + activations of the microbatches in flight + temporaries + rounding
    offload:    without optimizer state (`optimizer`), also without shards (`parameters`)       offload.py
    shard:      the rank's part of optimizer state and weights, and gathered weights           _permanent
    tensor:     the rank's share of every split module                                         split_profile.py
    expert:     the rank's experts, and buffers of the tokens on their way                     experts.py
    branches:   the shared modules and the rank's branches, and every branch's result          branches.py
    pipeline:   the stages of the rank; as many microbatches in flight as its schedule starts  stages.py
    reserved  ≥ allocated, rounded up to the segments that the allocator takes from the device
    device    = reserved + context

Every figure is bytes on one rank. On CUDA each tensor is rounded up to the allocator's granule. The reserved and device
figures are lower bounds, because fragmentation and the workspaces that convolutions try out are not replayed. On an
H200 the two added 3% to 69% to the allocated memory (validation/memory/one_gpu_h200.json).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from meshwright.blocks.module_names import enclosing_modules
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.values import BatchPolynomial, ModelProfile, Parameter
from meshwright.simulator.compute.host_work import captures_step
from meshwright.simulator.experts import divided_profile, expert_names, gathered_share
from meshwright.simulator.memory.checkpoint_copy import copy_bytes, whole_bytes
from meshwright.simulator.memory.device_memory import DeviceMemory
from meshwright.simulator.memory.replay import GatheredWeights, LiveBytes, MemoryMoment, Observer, PassPeaks, replay
from meshwright.simulator.offload import host_bytes, offload_of
from meshwright.simulator.pipeline.order import Action, Order, pipeline_order, stages_of_rank
from meshwright.simulator.pipeline.stages import StageProfile, stage_profiles
from meshwright.simulator.tensor.branches import (
    all_result_bytes,
    branch_rank_profiles,
    places_branches,
    plan_outside_branches,
)
from meshwright.simulator.tensor.split_profile import split_profile


@dataclass(frozen=True)
class MemoryPrediction:
    """The predicted peak memory of a rank. `breakdown` has the bytes in memory at the peak, which add up to
    `allocated_bytes`. `reserved_bytes` is what the allocator takes from the device for them, `device_bytes` also
    includes the driver's context, and `peak_at` names the part of the step in which the peak occurs. `host_bytes` is
    the CPU memory that a rank on a GPU needs for what the plan keeps there (`memory.offload`), and for the copy of a
    checkpoint that is being written; `copy_bytes` is that copy, also on CPU ranks."""

    breakdown: dict[str, int]
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    peak_at: str
    host_bytes: int = 0
    copy_bytes: int = 0


def predict_memory(
    profile: ModelProfile, plan: Plan, batch: float, optimizer: OptimizerCost, device: DeviceMemory
) -> MemoryPrediction:
    """The peak memory of the rank that needs most, if every microbatch of a rank has `batch` samples."""
    return max(rank_memories(profile, plan, batch, optimizer, device), key=lambda memory: memory.allocated_bytes)


def rank_memories(
    profile: ModelProfile,
    plan: Plan,
    batch: float,
    optimizer: OptimizerCost,
    device: DeviceMemory,
    shard_part: float | None = None,
) -> list[MemoryPrediction]:
    """The peak memory of each pipeline rank; if ranks hold different branches, of each rank of the tensor axis. The
    rank holds `shard_part` of what the shard axis divides; None: as much as the rank that holds most."""
    # The stages of ranks that hold different branches are not named after the segments of the whole model.
    units = frozenset() if places_branches(plan) else frozenset(segment.unit for segment in profile.segments)
    equal = _EqualStages(units)
    works = rank_works(profile, plan, batch, shard_part)
    replays = [replay_rank(work, plan, batch, optimizer, device, equal) for work in works]
    return [_rank_memory(rank, plan, batch, optimizer, device) for rank in replays]


@dataclass(frozen=True)
class RankStages:
    """The pipeline stages of a rank by their numbers, the actions that it runs in a step, the bytes of each parameter
    of the whole model, and the part that the rank holds of what the shard axis divides."""

    stages: dict[int, StageProfile]
    actions: Sequence[Action]
    whole: Mapping[str, float]
    shard_part: float

    def copy_bytes(self, plan: Plan, optimizer: OptimizerCost) -> float:
        """The bytes of a copy of what this rank writes of a checkpoint."""
        buffers = float(sum(stage.profile.buffer_bytes for stage in self.stages.values()))
        copied = copy_bytes(_parameters(self.stages), buffers, plan, optimizer, self.whole)
        return copied * self.shard_part * plan.axes.shard


def rank_works(profile: ModelProfile, plan: Plan, batch: float, shard_part: float | None = None) -> list[RankStages]:
    """What each pipeline rank holds and runs; if ranks hold different branches, each rank of the tensor axis."""
    ranks, schedule = plan.axes.pipeline, plan.pipeline.schedule
    if ranks > 1 and not plan.pipeline.cuts:
        raise InputError(f"the plan has a pipeline of {ranks} ranks but no cuts: its stages are not known")
    order, whole = _order(plan), whole_bytes(profile)
    part = plan.shard_part() if shard_part is None else shard_part
    if places_branches(plan):
        results = BatchPolynomial(all_result_bytes(profile, plan, batch), 0.0)
        shared_plan, works = plan_outside_branches(profile, plan), []
        for local in branch_rank_profiles(profile, plan):
            (stage,) = stage_profiles(split_profile(local, shared_plan), ())
            works.append(RankStages({0: replace(stage, received=results)}, order[0], whole, part))
        return works
    stages = stage_profiles(divided_profile(split_profile(profile, plan), plan), plan.pipeline.cuts)
    numbers = (
        [stages_of_rank(schedule, ranks, plan.stages_per_rank, rank) for rank in range(ranks)] if ranks > 1 else [(0,)]
    )
    return [
        RankStages({number: stages[number] for number in numbers[rank]}, order[rank], whole, part)
        for rank in range(ranks)
    ]


def _order(plan: Plan) -> Order:
    """The actions of each pipeline rank, as far as they are needed to find the peak. After a few rounds of microbatches
    a pipeline needs no more memory, so further rounds are left out, except for gpipe, which keeps the activations of
    all microbatches."""
    ranks, stages = plan.axes.pipeline, plan.stages_per_rank
    if ranks == 1:
        return ((Action(0, 0, "forward"), Action(0, 0, "backward")),)
    rounds = -(-plan.pipeline.microbatches // ranks)
    enough = rounds if plan.pipeline.schedule == "gpipe" else min(rounds, 2 * stages + 2)
    return pipeline_order(plan.pipeline.schedule, ranks, stages, min(plan.pipeline.microbatches, ranks * enough))


@dataclass
class _EqualStages:
    """The replayed passes of stages, so that those of equal stages are replayed once. `units` are the blocks that the
    segments of the model are named after (`TraceSegment.unit`)."""

    units: frozenset[str] = frozenset()
    known: dict[object, PassPeaks] = field(default_factory=dict)

    def key(self, stage: StageProfile, gathering: GatheredWeights | None, adds_gradients: bool) -> object:
        """Equal for equal stages. They share their tuples of operators and changes (stages.py); comparing what is in
        them takes long."""
        segments = tuple((s.phase, len(s.blocks), id(s.operators), id(s.changes)) for s in stage.profile.segments)
        weights = None
        if gathering is not None:
            blocks = gathering.blocks
            weights = gathering.root_bytes, *blocks.values(), *(name for name in blocks if name in self.units)
        return segments, weights, adds_gradients


@dataclass(frozen=True)
class RankReplay:
    """The replay of a rank: its `work`; the gradients of `earlier` microbatches, which are in memory during all passes;
    the replayed `passes` of each stage; and the bytes in memory in the `optimizer` step. `has_buckets` says whether
    gradients are in buckets."""

    work: RankStages
    earlier: LiveBytes
    passes: dict[int, PassPeaks]
    optimizer: LiveBytes
    has_buckets: bool


def replay_rank(
    work: RankStages,
    plan: Plan,
    batch: float,
    optimizer: OptimizerCost,
    device: DeviceMemory,
    equal: _EqualStages | None = None,
    observe: Observer | None = None,
) -> RankReplay:
    """Replays the passes of one microbatch on each stage of a rank. `equal` has the passes of other ranks' stages.
    `observe` is called for each change of memory, with the bytes of this pass alone."""
    stages = work.stages
    trainable = [float(parameter.bytes) for parameter in _parameters(stages) if parameter.trainable]
    shard = plan.axes.shard
    gradients = LiveBytes(gradients=sum(trainable), rounding=sum(map(device.rounding, trainable)))
    # Gradients are in memory from the start of a pass if they are in buckets, or if earlier microbatches or other
    # stages of the rank have computed some.
    has_buckets = plan.axes.replicate > 1 and shard == 1
    has_earlier_gradients = plan.memory.accumulation > 1 or plan.axes.pipeline > 1
    whole_gradients = shard == 1 or plan.memory.sharding == "optimizer"
    earlier = gradients if has_buckets or has_earlier_gradients else LiveBytes()
    offload = offload_of(plan, device.kind)
    if offload == "parameters":  # shards of gradients are in CPU memory
        earlier = LiveBytes()
    elif not whole_gradients and has_earlier_gradients:
        earlier = LiveBytes(gradients=gradients.gradients * work.shard_part, rounding=gradients.rounding)
    adds_gradients = whole_gradients and earlier.gradients > 0
    passes = {}
    for number, stage in stages.items():
        gathering = _gathered_weights(stage, plan, work.shard_part) if shard > 1 else None
        key = equal.key(stage, gathering, adds_gradients) if equal else None
        known = equal.known.get(key) if equal else None
        passes[number] = known or replay(
            stage.profile,
            batch,
            device.rounding,
            adds_gradients=adds_gradients,
            gathering=gathering,
            workspaces=device.convolution_workspaces and plan.compute.layout == "contiguous",
            observe=observe,
        )
        if equal:
            equal.known[key] = passes[number]
    optimizer_live = LiveBytes()
    if offload != "parameters":
        temporaries = optimizer if offload == "none" else replace(optimizer, temporary_ratio=0.0)
        optimizer_live = _optimizer_step([size * work.shard_part for size in trainable], temporaries, device)
    return RankReplay(work, earlier, passes, optimizer_live, has_buckets)


def _rank_memory(
    rank: RankReplay, plan: Plan, batch: float, optimizer: OptimizerCost, device: DeviceMemory
) -> MemoryPrediction:
    stages = rank.work.stages
    peak = _peak_of_actions(stages, rank.passes, rank.work.actions, batch, rank.earlier)
    peak = max(peak, MemoryMoment(rank.optimizer, "optimizer step"), key=lambda moment: moment.live.total())
    breakdown = live_by_kind(peak.live, rank, plan, batch, optimizer, device)
    allocated = sum(breakdown.values())
    reserved = ceil(allocated / device.segment) * device.segment if device.segment else allocated
    on_host = 0
    if offload_of(plan, device.kind) != "none":
        shard, parameters = plan.axes.shard, _parameters(stages)
        weights_bytes = sum(parameter.bytes for parameter in parameters) / shard
        trained_bytes = sum(parameter.bytes for parameter in parameters if parameter.trainable) / shard
        on_host = round(host_bytes(plan, weights_bytes, trained_bytes, optimizer))
    copied = round(rank.work.copy_bytes(plan, optimizer)) if device.checkpoint_copies else 0
    if device.kind != "cpu":
        on_host += copied
    return MemoryPrediction(
        breakdown, allocated, reserved, reserved + device.context_bytes, peak.where, on_host, copied
    )


def live_by_kind(
    live: LiveBytes, rank: RankReplay, plan: Plan, batch: float, optimizer: OptimizerCost, device: DeviceMemory
) -> dict[str, int]:
    """All bytes in memory at one moment of a step, by kind: those that stay allocated, and `live`."""
    permanent, permanent_rounding = _permanent(rank.work, plan, batch, optimizer, device)
    if device.checkpoint_copies and device.kind == "cpu":
        permanent["checkpoint copy"] = rank.work.copy_bytes(plan, optimizer)
    breakdown = {
        **{name: round(size) for name, size in permanent.items()},
        "gathered weights": round(live.gathered),
        "gradient buckets" if rank.has_buckets else "gradients": round(live.gradients),
        "reduction buffers": round(live.buckets),
        "activations": round(live.saved),
        "temporaries": round(live.temporary),
        "allocator rounding": round(live.rounding + permanent_rounding),
    }
    if plan.axes.shard == 1:
        del breakdown["gathered weights"], breakdown["reduction buffers"]
    return breakdown


def _parameters(stages: dict[int, StageProfile]) -> list[Parameter]:
    """The parameters of all stages of a rank; a tied parameter that several stages use is listed once."""
    return list({p.names[0]: p for stage in stages.values() for p in stage.profile.parameters}.values())


def _peak_of_actions(
    stages: dict[int, StageProfile],
    passes: dict[int, PassPeaks],
    actions: Sequence[Action],
    batch: float,
    earlier: LiveBytes,
) -> MemoryMoment:
    """The largest of `action_peaks`. There are many actions, so this adds up whole bytes. What they consist of is
    computed for the peak only."""
    saved, added = _saved_and_added(stages, passes, batch)
    saved_bytes = {number: round(live.total()) for number, live in saved.items()}
    added_bytes = {key: round(live.total()) for key, live in added.items()}
    in_flight = dict.fromkeys(stages, 0)
    live_bytes = peak_bytes = 0
    peak: tuple[int, str, dict[int, int]] | None = None
    for stage, _, kind in actions:
        phase = "forward" if kind == "forward" else "backward"
        if (now_bytes := live_bytes + added_bytes[stage, phase]) > peak_bytes:
            peak_bytes, peak = now_bytes, (stage, phase, dict(in_flight))
        if kind == "forward":
            in_flight[stage] += 1
            live_bytes += saved_bytes[stage]
        elif kind != "input_backward":
            in_flight[stage] -= 1
            live_bytes -= saved_bytes[stage]
    if peak is None:
        return MemoryMoment(earlier, "start")
    stage, phase, microbatches = peak
    live = earlier.plus(added[stage, phase])
    for number, count in microbatches.items():
        live = live.plus(saved[number].scaled(count))
    return MemoryMoment(live, (passes[stage].forward if phase == "forward" else passes[stage].backward).where)


def action_peaks(
    stages: dict[int, StageProfile],
    passes: dict[int, PassPeaks],
    actions: Sequence[Action],
    batch: float,
    earlier: LiveBytes,
) -> Iterator[MemoryMoment]:
    """Yields the moment of each action with most bytes in memory. The memory during an action is that of its pass, plus
    the gradients of `earlier` microbatches, plus the tensors that other microbatches have saved. Saved tensors are
    assumed to stay until the gradients of the weights are computed."""
    saved, added = _saved_and_added(stages, passes, batch)
    live = earlier
    for stage, _, kind in actions:
        phase = "forward" if kind == "forward" else "backward"
        where = (passes[stage].forward if phase == "forward" else passes[stage].backward).where
        yield MemoryMoment(live.plus(added[stage, phase]), where)
        if kind == "forward":
            live = live.plus(saved[stage])
        elif kind != "input_backward":
            live = live.plus(_negative(saved[stage]))


def _saved_and_added(
    stages: dict[int, StageProfile], passes: dict[int, PassPeaks], batch: float
) -> tuple[dict[int, LiveBytes], dict[tuple[int, str], LiveBytes]]:
    """The bytes that a forward pass of each stage leaves in memory, and those that each pass adds at its peak. A
    backward pass starts with the tensors that its own microbatch has saved, so these are counted once."""
    saved = {
        number: passes[number].saved.plus(LiveBytes(saved=stage.received.at(batch))) for number, stage in stages.items()
    }
    added = {(number, "forward"): peaks.forward.live for number, peaks in passes.items()}
    for number, peaks in passes.items():
        added[number, "backward"] = peaks.backward.live.plus(_negative(peaks.saved))
    return saved, added


def _negative(live: LiveBytes) -> LiveBytes:
    return LiveBytes(saved=-live.saved, temporary=-live.temporary, rounding=-live.rounding)


def _gathered_weights(stage: StageProfile, plan: Plan, shard_part: float) -> GatheredWeights:
    names = set(stage.profile.blocks)
    blocks: dict[str, float] = {}
    root_bytes = 0.0
    share = gathered_share(plan.axes)
    experts = expert_names(stage.profile) if share < 1 else frozenset()
    for parameter in stage.profile.parameters:
        size = parameter.bytes * (share if parameter.names[0] in experts else 1.0)
        name = next((module for module in enclosing_modules(parameter.names[0])[:-1] if module in names), None)
        if name is None:
            root_bytes += size
        else:
            blocks[name] = blocks.get(name, 0.0) + size
    return GatheredWeights(blocks, root_bytes, shard_part, plan.memory.sharding != "parameters", plan.shard_padding)


def _permanent(
    work: RankStages, plan: Plan, batch: float, optimizer: OptimizerCost, device: DeviceMemory
) -> tuple[dict[str, float], float]:
    """The bytes that stay allocated during all of training, by name, and the bytes that the allocator's rounding adds
    to weights and optimizer state."""
    profiles = [stage.profile for stage in work.stages.values()]
    part, rounding = work.shard_part, device.rounding
    offload = offload_of(plan, device.kind)
    weights = [p.bytes * part for p in _parameters(work.stages)] if offload != "parameters" else []
    trainable = [p.bytes * part for p in _parameters(work.stages) if p.trainable] if offload == "none" else []
    permanent = {
        "weights": sum(weights),
        "buffers": float(sum(profile.buffer_bytes for profile in profiles)),
        "inputs": sum(profile.input_bytes.at(batch) for profile in profiles) * plan.pipeline.microbatches,
        "optimizer state": sum(trainable) * optimizer.state_ratio,
        "workspace": float(device.workspace_bytes),
    }
    if captures_step(plan, on_gpu=device.workspace_bytes > 0):
        # The graph has a copy of the inputs and, because it runs on a stream of its own, a second workspace.
        permanent["CUDA graph"] = permanent["inputs"] + permanent["workspace"]
    return permanent, sum(map(rounding, weights)) + optimizer.state_ratio * sum(map(rounding, trainable))


def _optimizer_step(trainable: list[float], optimizer: OptimizerCost, device: DeviceMemory) -> LiveBytes:
    """The bytes in memory during the optimizer step: all gradients, and the optimizer's temporaries, which a
    multi-tensor optimizer allocates for all parameters at once and other optimizers for one parameter at a time (here
    the largest)."""
    if not trainable:
        return LiveBytes()
    sizes = trainable if optimizer.multi_tensor else [max(trainable)]
    temporary = optimizer.temporary_ratio
    return LiveBytes(
        gradients=sum(trainable),
        temporary=temporary * sum(sizes),
        rounding=sum(map(device.rounding, trainable)) + temporary * sum(map(device.rounding, sizes)),
    )
