"""The error message of a search that has found no plan."""

from collections.abc import Sequence
from math import ceil

from meshwright.cluster.cluster import Device
from meshwright.plan import Plan
from meshwright.planner.constraints.contradictions import no_plan_keeps
from meshwright.planner.explanation.units import gib
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.search_result import SearchResult


def describe_closest(inputs: PlanningInputs, results: Sequence[SearchResult]) -> str:
    """Says which plan needs the least memory, and how much is missing; or why no candidate was accepted."""
    options: list[tuple[float, Plan, str, Device]] = []
    refusal = ""
    for result in results:
        options += [
            (priced.needed_bytes, priced.plan, "", priced.prediction.fullest_device or inputs.device)
            for priced in result.family_bests
        ]
        options += [(excluded.needed_bytes, excluded.plan, "at least ", inputs.device) for excluded in result.excluded]
        refusal = refusal or result.refusal
    if not options:
        return no_plan_keeps(inputs, refusal)
    needed, plan, at_least, device = min(options, key=lambda option: option[0] / inputs.capacity_of(option[3]))
    capacity = inputs.capacity_of(device)
    limit = inputs.constraints.max_memory
    reason = f"{gib(device.memory_bytes)} without a margin of {inputs.memory_margin:.0%}"
    is_limited = limit is not None and limit == capacity
    if is_limited:
        reason = "max_memory"
    kept = f" with the constraints ({inputs.constraints.describe()})" if inputs.constraints else ""
    kept += f", also with memory.offload: {inputs.offload}" if inputs.offload != "none" else ""
    return (
        f"the model fits no plan on '{inputs.cluster.name}'{kept}: the closest, {plan.summary()}, needs {at_least}"
        f"{gib(needed)}, but a plan may use {gib(capacity)} of one {device.name} ({reason}). That is"
        f" {gib(needed - capacity)} too much: {'raise max_memory, or ' if is_limited else ''}"
        f"{_what_would_help(inputs, results)}"
    )


def _what_would_help(inputs: PlanningInputs, results: Sequence[SearchResult]) -> str:
    parameters = results[0].summary.profile.parameters
    weights = sum(parameter.bytes for parameter in parameters)
    trained = sum(parameter.bytes for parameter in parameters if parameter.trainable)
    states = weights + trained * (1 + inputs.optimizer.state_ratio)
    devices = ceil(states / inputs.capacity_bytes) if inputs.capacity_bytes else 0
    if devices <= inputs.cluster.device_count:
        return "use more or larger devices, or a smaller batch"
    return (
        f"use more or larger devices. Without offload, {devices:,} devices of this kind are needed at least, for"
        f" weights, gradients and optimizer state of {gib(states)}"
    )
