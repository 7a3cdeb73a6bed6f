"""How much memory a rank needs: the tensors of a step, replayed in the order in which they live and die.

    allocated = weights + buffers + inputs + optimizer state + workspace                               (always there)
              + max over the step of  gathered weights + gradients + buckets                           (replay.py)
                                    + activations of the microbatches under way + temporaries + rounding
    shard n:    optimizer state / n, and weights / n beside the gathered ones                          (sharding)
    tensor:     the rank's share of every split module                                                 (tensor.py)
    branches:   what is shared and the rank's own, and every branch's result                           (branches.py)
    pipeline:   the stages of the rank; as many microbatches under way as its schedule runs ahead      (stages.py)
    reserved  ≥ allocated, rounded up to the segments the allocator takes from the device
    device    = reserved + context

Every figure is bytes on one rank. On CUDA each tensor is rounded up to the allocator's granule. The reserved and device
figures are the least there can be: what fragments and what convolutions try out is not replayed, and on an H200
cost 3% to 69% more than was allocated (validation/memory/one_gpu_h200.json).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.values import Growth, ModelProfile, Parameter
from meshwright.simulator.memory.replay import Gathering, Held, Moment, Passes, replay
from meshwright.simulator.pipeline.order import Action, Order, pipeline_order, stages_of
from meshwright.simulator.pipeline.stages import Stage, stage_profiles
from meshwright.simulator.tensor.branches import around, held, is_apart, results_bytes
from meshwright.simulator.tensor.split_profile import split_profile

MIB = 2**20


@dataclass(frozen=True)
class DeviceMemory:
    """What a kind of device adds: `workspace` of its matrix library, `context` of its driver, and its allocator's
    `granule`. `segment` is what CUDA's allocator takes for one large tensor; a rest of under a MiB stays with it.
    Where it `turns_images`, convolutions take the workspace that their operators tell."""

    granule: int = 1
    segment: int = 0
    workspace_bytes: int = 0
    context_bytes: int = 0
    turns_images: bool = False

    def rounding(self, size: float) -> float:
        """What the allocator adds to a tensor of this size."""
        if size <= 0:
            return 0.0
        if self.segment and size >= 10 * MIB:
            rest = ceil(size / self.segment) * self.segment - size
            if rest <= MIB:
                return rest
        return ceil(size / self.granule) * self.granule - size


CPU_MEMORY = DeviceMemory()
# measured: H200, torch 2.11: the workspace is what the two bf16 rows of VGG16 in validation/memory/one_gpu_h200.json
# leave unexplained, the context what the device shows beside the allocator's.
CUDA_MEMORY = DeviceMemory(
    granule=512, segment=2 * MIB, workspace_bytes=72 * MIB, context_bytes=780 * MIB, turns_images=True
)


@dataclass(frozen=True)
class MemoryPrediction:
    """`breakdown` is what lay in memory at the peak, and adds up to `allocated_bytes`."""

    breakdown: dict[str, int]
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    peak_at: str


def predict_memory(
    profile: ModelProfile, plan: Plan, batch: int, optimizer: OptimizerCost, device: DeviceMemory
) -> MemoryPrediction:
    """The peak of the worst rank, where each trains `batch` samples a microbatch."""
    if is_apart(plan):
        return _apart(profile, plan, batch, optimizer, device)
    ranks, schedule = plan.axes.pipeline, plan.pipeline.schedule
    if ranks > 1 and not plan.pipeline.cuts:
        raise InputError(f"the plan has a pipeline of {ranks} ranks but no cuts: its stages are not known")
    stages = stage_profiles(split_profile(profile, plan), plan.pipeline.cuts)
    order = _order(plan)
    predicted = []
    for rank in range(ranks):
        numbers = stages_of(schedule, ranks, plan.stages_per_rank, rank) if ranks > 1 else (0,)
        own = {number: stages[number] for number in numbers}
        predicted.append(_rank(own, order[rank], plan, batch, optimizer, device))
    return max(predicted, key=lambda rank: rank.allocated_bytes)


def _apart(
    profile: ModelProfile, plan: Plan, batch: int, optimizer: OptimizerCost, device: DeviceMemory
) -> MemoryPrediction:
    """Of the ranks that branches live on, the one that needs most."""
    results = Growth(results_bytes(profile, plan, batch), 0.0)
    shared, order = around(profile, plan), _order(plan)
    predicted = []
    for own in held(profile, plan):
        (stage,) = stage_profiles(split_profile(own, shared), ())
        alone = {0: replace(stage, received=results)}
        predicted.append(_rank(alone, order[0], plan, batch, optimizer, device))
    return max(predicted, key=lambda rank: rank.allocated_bytes)


def _order(plan: Plan) -> Order:
    """A pipeline that runs longer holds no more than one that is filled a few times."""
    ranks, stages = plan.axes.pipeline, plan.stages_per_rank
    if ranks == 1:
        return ((Action(0, 0, "forward"), Action(0, 0, "backward")),)
    rounds = -(-plan.pipeline.microbatches // ranks)
    # gpipe holds them all
    enough = rounds if plan.pipeline.schedule == "gpipe" else min(rounds, 2 * stages + 2)
    return pipeline_order(plan.pipeline.schedule, ranks, stages, min(plan.pipeline.microbatches, ranks * enough))


def _rank(
    stages: dict[int, Stage],
    actions: Sequence[Action],
    plan: Plan,
    batch: int,
    optimizer: OptimizerCost,
    device: DeviceMemory,
) -> MemoryPrediction:
    trainable = [float(p.bytes) for p in _parameters(stages) if p.trainable]
    shard = plan.axes.shard
    gradients = Held(gradients=sum(trainable), rounding=sum(map(device.rounding, trainable)))
    # Buckets, earlier microbatches, or the other stages of the rank: then gradients are there from the start.
    bucketed = plan.axes.replicate > 1 and shard == 1
    repeated = plan.memory.accumulation > 1 or plan.axes.pipeline > 1
    whole = shard == 1 or plan.memory.sharding == "optimizer"
    held = gradients if bucketed or repeated else Held()
    if not whole and repeated:
        held = Held(gradients=gradients.gradients / shard, rounding=gradients.rounding)
    gathering = {number: _gathering(stage, plan) if shard > 1 else None for number, stage in stages.items()}
    passes = {
        number: replay(
            stage.profile,
            batch,
            device.rounding,
            held=held.gradients if whole else 0.0,
            gathering=gathering[number],
            workspaces=device.turns_images and plan.compute.layout == "contiguous",
        )
        for number, stage in stages.items()
    }
    peak = _schedule(stages, passes, actions, batch, held)
    step = Moment(_optimizer_step([size / shard for size in trainable], optimizer, device), "optimizer step")
    peak = max(peak, step, key=lambda moment: moment.held.total())
    always, always_rounding = _always(stages, plan, batch, optimizer, device)
    breakdown = {
        **{name: round(size) for name, size in always.items()},
        "gathered weights": round(peak.held.gathered),
        "gradient buckets" if bucketed else "gradients": round(peak.held.gradients),
        "reduction buffers": round(peak.held.buckets),
        "activations": round(peak.held.saved),
        "temporaries": round(peak.held.temporary),
        "allocator rounding": round(peak.held.rounding + always_rounding),
    }
    if shard == 1:
        del breakdown["gathered weights"], breakdown["reduction buffers"]
    allocated = sum(breakdown.values())
    reserved = ceil(allocated / device.segment) * device.segment if device.segment else allocated
    return MemoryPrediction(breakdown, allocated, reserved, reserved + device.context_bytes, peak.where)


def _parameters(stages: dict[int, Stage]) -> list[Parameter]:
    """Of all stages of a rank; a tied one that several of them use is there once."""
    return list({p.names[0]: p for stage in stages.values() for p in stage.profile.parameters}.values())


def _schedule(
    stages: dict[int, Stage], passes: dict[int, Passes], actions: Sequence[Action], batch: int, held: Held
) -> Moment:
    """The largest moment of a rank that runs these actions: the one under way, beside what the others hold. Until
    the gradients of the weights are done, all that was saved is taken to stay."""
    between = {
        number: passes[number].saved.plus(Held(saved=stage.received.at(batch))) for number, stage in stages.items()
    }
    under_way, most = held, Moment(held, "start")
    for stage, _, kind in actions:
        whole = passes[stage].forward if kind == "forward" else passes[stage].backward
        beside = under_way if kind == "forward" else under_way.plus(_negative(passes[stage].saved))
        if (now := beside.plus(whole.held)).total() > most.held.total():
            most = Moment(now, whole.where)
        if kind == "forward":
            under_way = under_way.plus(between[stage])
        elif kind != "input_backward":
            under_way = under_way.plus(_negative(between[stage]))
    return most


def _negative(held: Held) -> Held:
    return Held(saved=-held.saved, temporary=-held.temporary, rounding=-held.rounding)


def _gathering(stage: Stage, plan: Plan) -> Gathering:
    blocks: dict[str, float] = {}
    root = 0.0
    for parameter in stage.profile.parameters:
        name = next((b for b in stage.profile.blocks if parameter.names[0].startswith(f"{b}.")), None)
        if name is None:
            root += parameter.bytes
        else:
            blocks[name] = blocks.get(name, 0.0) + parameter.bytes
    return Gathering(blocks, root, plan.axes.shard, keeps=plan.memory.sharding != "parameters")


def _always(
    stages: dict[int, Stage], plan: Plan, batch: int, optimizer: OptimizerCost, device: DeviceMemory
) -> tuple[dict[str, float], float]:
    """What is there from the first step to the last, and its rounding."""
    profiles = [stage.profile for stage in stages.values()]
    shard, rounding = plan.axes.shard, device.rounding
    weights = [p.bytes / shard for p in _parameters(stages)]
    trainable = [p.bytes / shard for p in _parameters(stages) if p.trainable]
    always = {
        "weights": sum(weights),
        "buffers": float(sum(profile.buffer_bytes for profile in profiles)),
        "inputs": sum(profile.input_bytes.at(batch) for profile in profiles) * plan.pipeline.microbatches,
        "optimizer state": sum(trainable) * optimizer.state,
        "workspace": float(device.workspace_bytes),
    }
    return always, sum(map(rounding, weights)) + optimizer.state * sum(map(rounding, trainable))


def _optimizer_step(trainable: list[float], optimizer: OptimizerCost, device: DeviceMemory) -> Held:
    """Gradients are all there; temporaries are of all parameters together, or of the largest one."""
    if not trainable:
        return Held()
    sizes = trainable if optimizer.at_once else [max(trainable)]
    return Held(
        gradients=sum(trainable),
        temporary=optimizer.temporary * sum(sizes),
        rounding=sum(map(device.rounding, trainable)) + optimizer.temporary * sum(map(device.rounding, sizes)),
    )
