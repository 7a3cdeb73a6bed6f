"""Seconds of the passes of a profile on one rank, and of the optimizer step.

busy      = sum of operator_s over the operators of a pass                                             pass_s
launches  = the number of operators that the host launches, plus its other work, counted in launches   pass_s
optimizer = bytes moved / bandwidth × measured slowdown of multi-tensor steps                          optimizer_s
            single-tensor steps on a GPU: the longer of what their operators and their launches take   optimizer_s
"""

from math import log2

from meshwright.cluster.cluster import Device
from meshwright.dtypes import Dtype
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.values import ModelProfile, Operator, Phase, TraceSegment
from meshwright.simulator.compute.operator_time import (
    DeviceSpeeds,
    memory_bound_s,
    operator_s,
    reference_gpu,
)
from meshwright.simulator.profile_cache import ProfileCache
from meshwright.simulator.runtime import OUR_RUNTIME, Runtime

# Work of the host, counted in operators that it could launch in that time (`Device.launch_s` each). Measured on the
# host of the reference GPU with sequences of small layers. `python -m validation.host_costs` on a GPU measures these
# values again; with torch 2.11 on such a host it printed 0.75 for a cast, 30 and 0.10 for the step overhead, and 0.35
# to 0.37 without gradients.
CAST = 0.4  # a cast that autocast inserts: it is cheaper because no line of Python calls it
STEP_OVERHEAD = 14.0  # what our step does in addition to its passes, including the launch of a multi-tensor optimizer
STEP_OVERHEAD_PER_PARAMETER = 0.11
WITHOUT_GRADIENTS = 0.34  # an operator of a single-tensor optimizer, which records no gradient
# Operators per tensor that a single-tensor optimizer is charged with on a CPU core. Chosen, not measured: torch's SGD
# with momentum runs 3, RMSprop 6 and AdamW 10, each cheaper than an operator that records a gradient.
_CPU_OPTIMIZER_OPERATORS = 5


_PASSES: ProfileCache[tuple[tuple[float, float], DeviceSpeeds]] = ProfileCache(1024)


def product_dtype(precision: str) -> Dtype:
    """The dtype of matrix products under a plan's precision; under fp8, of those that are not in 8 bits (float8.py)."""
    types: dict[str, Dtype] = {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
    return types[precision]


def operator_launch_s(device: Device) -> float:
    """Seconds that the host needs to launch one operator; for a device without measured operators, the seconds of the
    reference GPU's host."""
    return device.launch_s if device.operators else reference_gpu()[0].launch_s


def pass_s(profile: ModelProfile, phase: Phase, batch: float, speeds: DeviceSpeeds, tf32: bool) -> tuple[float, float]:
    """The seconds that the device is busy with a pass, and the number of operators that its host launches in the pass.
    The other work of the host in a step is added to the launches of the forward pass, counted in launches."""
    # The value holds the speeds, so that no other speeds get their id.
    key = (phase, batch, id(speeds), tf32)
    return _PASSES.get(profile, key, lambda: (_pass_s(profile, phase, batch, speeds, tf32), speeds))[0]


def _pass_s(profile: ModelProfile, phase: Phase, batch: float, speeds: DeviceSpeeds, tf32: bool) -> tuple[float, float]:
    busy, operators = 0.0, 0.0
    if phase == "forward":
        operators += STEP_OVERHEAD + STEP_OVERHEAD_PER_PARAMETER * len(profile.parameters)
    for segment in profile.segments:
        if segment.phase == phase:
            busy += segment.block_count * _segment_s(segment, batch, speeds, tf32)
            operators += segment.block_count * sum(_launches(o) for o in segment.operators)
    return busy, operators


def _segment_s(segment: TraceSegment, batch: float, speeds: DeviceSpeeds, tf32: bool) -> float:
    backward = segment.phase == "backward"
    return sum(o.runs * operator_s(o, batch, speeds, backward, tf32) for o in segment.operators)


def _launches(operator: Operator) -> float:
    return operator.runs * (CAST if operator.name == "_to_copy" else 1.0)


def optimizer_s(
    weights_bytes: float,
    tensors: int,
    optimizer: OptimizerCost,
    device: Device,
    speeds: DeviceSpeeds,
    runtime: Runtime = OUR_RUNTIME,
) -> float:
    """Seconds of the optimizer step of one rank, which updates `weights_bytes` of parameters in `tensors` tensors. The
    launch of a multi-tensor step is not included: `pass_s` counts it in `STEP_OVERHEAD`."""
    if not weights_bytes:
        return 0.0
    if device.kind == "cuda" and optimizer.operators_per_parameter:
        operators, traffic = optimizer.operators_per_parameter * tensors, weights_bytes * optimizer.traffic_ratio
        busy_s = operators * memory_bound_s("elementwise", traffic / operators, "fp32", speeds, backward=False)
        launch_s = operator_launch_s(device) * WITHOUT_GRADIENTS * operators
        wait_s = runtime.host_wait_s(launch_s) if optimizer.waits_for_device else 0.0
        return max(busy_s, wait_s, traffic / speeds.bandwidth_bytes_per_s)
    launch_s = 0.0
    if not optimizer.multi_tensor:
        launch_s = operator_launch_s(device) * _CPU_OPTIMIZER_OPERATORS * tensors
    traffic = weights_bytes * (3 + 2 * optimizer.state_ratio)
    # A measured multi-tensor step goes over all tensors several times, once per operation; a fused step only once.
    fused = optimizer.is_fused or (optimizer.state_ratio >= 2 and not optimizer.temporary_ratio)
    table = None
    if optimizer.state_ratio and not fused:
        table = speeds.table("optimizer 2" if optimizer.state_ratio > 1 else "optimizer 1", "forward", "fp32")
    slowdown = table.slowdown((log2(traffic * speeds.memory_scale),)) if table else 1.0
    return max(traffic / speeds.bandwidth_bytes_per_s * slowdown, launch_s)
