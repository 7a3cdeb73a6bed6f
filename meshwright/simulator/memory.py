"""How much memory a rank needs: the tensors of a step, replayed in the order in which they live and die.

    allocated = max over the step of  weights + buffers + inputs + optimizer state + workspace        (always there)
                                    + gradients + saved activations + temporaries + rounding          (replayed)
    reserved  ≥ allocated, rounded up to the segments the allocator takes from the device
    device    = reserved + context

Every figure is bytes on one rank. On CUDA each tensor is rounded up to the allocator's granule. The reserved and device
figures are the least there can be: what fragments and what convolutions try out is not replayed, and on an H200
cost 3% to 69% more than was allocated (bench/memory_h200.json).
"""

from dataclasses import dataclass, replace
from math import ceil

from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.values import Change, ModelProfile

MIB = 2**20


@dataclass(frozen=True)
class DeviceMemory:
    """What a kind of device adds: `workspace` of its matrix library, `context` of its driver, and its allocator's
    `granule`. `segment` is what CUDA's allocator takes for one large tensor; a rest of under a MiB stays with it."""

    granule: int = 1
    segment: int = 0
    workspace_bytes: int = 0
    context_bytes: int = 0

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
# measured: H200, torch 2.11: the workspace is what the two bf16 rows of VGG16 in bench/memory_h200.json leave
# unexplained, the context what the device shows beside the allocator's.
CUDA_MEMORY = DeviceMemory(granule=512, segment=2 * MIB, workspace_bytes=72 * MIB, context_bytes=780 * MIB)


@dataclass(frozen=True)
class MemoryPrediction:
    """`breakdown` is what lay in memory at the peak, and adds up to `allocated_bytes`."""

    breakdown: dict[str, int]
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    peak_at: str


@dataclass
class _Running:
    gradients: float = 0.0
    saved: float = 0.0
    temporary: float = 0.0
    rounding: float = 0.0

    def total(self) -> float:
        return self.gradients + self.saved + self.temporary + self.rounding


def predict_memory(
    profile: ModelProfile, plan: Plan, batch: int, optimizer: OptimizerCost, device: DeviceMemory
) -> MemoryPrediction:
    """The peak of one rank that trains `batch` samples a microbatch."""
    trainable = [float(p.bytes) for p in profile.parameters if p.trainable]
    bucketed = plan.axes.replicate > 1
    gradients = _Running(gradients=sum(trainable), rounding=sum(map(device.rounding, trainable)))
    held = gradients if bucketed or plan.memory.accumulation > 1 else _Running()
    peak, at = _replay(profile, batch, device, held)
    step = _optimizer_step(trainable, gradients, optimizer, device)
    if step.total() > peak.total():
        peak, at = step, "optimizer step"
    always, always_rounding = _always(profile, batch, optimizer, device)
    breakdown = {
        **{name: round(size) for name, size in always.items()},
        "gradient buckets" if bucketed else "gradients": round(peak.gradients),
        "activations": round(peak.saved),
        "temporaries": round(peak.temporary),
        "allocator rounding": round(peak.rounding + always_rounding),
    }
    allocated = sum(breakdown.values())
    reserved = ceil(allocated / device.segment) * device.segment if device.segment else allocated
    return MemoryPrediction(breakdown, allocated, reserved, reserved + device.context_bytes, at)


def _always(
    profile: ModelProfile, batch: int, optimizer: OptimizerCost, device: DeviceMemory
) -> tuple[dict[str, float], float]:
    """What is there from the first step to the last, and its rounding."""
    weights = [float(p.bytes) for p in profile.parameters]
    trainable = [float(p.bytes) for p in profile.parameters if p.trainable]
    always = {
        "weights": sum(weights),
        "buffers": float(profile.buffer_bytes),
        "inputs": profile.input_bytes.at(batch),
        "optimizer state": sum(trainable) * optimizer.state,
        "workspace": float(device.workspace_bytes),
    }
    rounding = sum(map(device.rounding, weights)) + optimizer.state * sum(map(device.rounding, trainable))
    return always, rounding


def _replay(profile: ModelProfile, batch: int, device: DeviceMemory, held: _Running) -> tuple[_Running, str]:
    """The largest moment of the two passes. `held` gradients are there from the start (buckets, or those of earlier
    microbatches): a new one is then only added to them."""
    now, most, where = replace(held), replace(held), "start"
    for stretch in profile.stretches:
        steps = [_step(change, batch, device) for change in stretch.changes]
        for _ in range(stretch.count):
            for (size, rounding), change in zip(steps, stretch.changes, strict=True):
                passing = change.role == "gradient" and held.gradients > 0
                now.rounding += rounding
                if change.role == "saved":
                    now.saved += size
                elif change.role == "temporary" or passing:
                    now.temporary += size
                else:
                    now.gradients += size
                if now.total() > most.total():
                    most, where = replace(now), f"{stretch.phase} of {change.layer or 'the model'}"
                if passing:
                    now.temporary -= size
                    now.rounding -= rounding
    return most, where


def _step(change: Change, batch: int, device: DeviceMemory) -> tuple[float, float]:
    size = change.bytes.at(batch)
    rounding = device.rounding(size) if size > 0 else -device.rounding(-size)
    return size * change.times, rounding * change.times


def _optimizer_step(
    trainable: list[float], gradients: _Running, optimizer: OptimizerCost, device: DeviceMemory
) -> _Running:
    """Gradients are all there; temporaries are of all parameters together, or of the largest one."""
    if not trainable:
        return _Running()
    sizes = trainable if optimizer.at_once else [max(trainable)]
    temporary = optimizer.temporary * sum(sizes)
    rounding = gradients.rounding + optimizer.temporary * sum(map(device.rounding, sizes))
    return _Running(gradients=gradients.gradients, temporary=temporary, rounding=rounding)
