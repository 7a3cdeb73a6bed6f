"""The error message of a search that has found no plan: how much memory is missing, on how many devices the model would
fit, and what else would make it fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from meshwright.cluster.cluster import Device
from meshwright.errors import InputError
from meshwright.numbers.units import bytes_text
from meshwright.plan import Plan
from meshwright.planner.constraints.apply import keeps_constraints
from meshwright.planner.constraints.contradictions import no_plan_keeps
from meshwright.planner.constraints.space import divisors
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.model_summary import ModelSummary
from meshwright.planner.search_result import SearchResult
from meshwright.simulator.predict import Prediction, predict_plan

_MOST_DEVICES = 1024  # of the plain plans that are tried on more devices


@dataclass(frozen=True)
class _Closest:
    """A plan that does not fit, and what it needs of a device; `at_least` if that is a bound."""

    plan: Plan
    needed_bytes: float
    device: Device
    summary: ModelSummary
    at_least: bool = False


def describe_closest(inputs: PlanningInputs, results: Sequence[SearchResult]) -> str:
    """Says which plan needs the least memory, how much is missing, and what would make the model fit; or why no
    candidate was accepted."""
    plans = [plan for result in results for plan in _too_large(inputs, result)]
    if not plans:
        return no_plan_keeps(inputs, next((result.refusal for result in results if result.refusal), ""))
    closest = min(plans, key=lambda plan: plan.needed_bytes / inputs.capacity_of(plan.device))
    if closest.at_least:
        closest = _predicted(closest, inputs)
    capacity, device = inputs.capacity_of(closest.device), closest.device
    is_limited = inputs.constraints.max_memory is not None and inputs.constraints.max_memory == capacity
    margin = f"{bytes_text(device.memory_bytes)} without a margin of {inputs.memory_margin:.0%}"
    kept = f" with the constraints ({inputs.constraints.describe()})" if inputs.constraints else ""
    kept += f", also with memory.offload: {inputs.offload}" if inputs.offload != "none" else ""
    return (
        f"the model fits no plan on '{inputs.cluster.name}'{kept}: the closest, {closest.plan.summary()}, needs"
        f" {'at least ' * closest.at_least}{bytes_text(closest.needed_bytes)}, but a plan may use"
        f" {bytes_text(capacity)} of one"
        f" {device.name} ({'max_memory' if is_limited else margin}). That is"
        f" {bytes_text(closest.needed_bytes - capacity)} too much: {'raise max_memory, or ' * is_limited}"
        f"{_what_would_help(closest, inputs)}"
    )


def _too_large(inputs: PlanningInputs, result: SearchResult) -> list[_Closest]:
    simulated = [
        _Closest(priced.plan, priced.needed_bytes, priced.prediction.fullest_device or inputs.device, result.summary)
        for priced in result.family_bests
    ]
    return simulated + [
        _Closest(excluded.plan, excluded.needed_bytes, inputs.device, result.summary, at_least=True)
        for excluded in result.excluded
    ]


def _predict(plan: Plan, inputs: PlanningInputs, summary: ModelSummary, devices: int = 0) -> Prediction | None:
    """The prediction of a plan, on so many devices if there are any given; None if it cannot be predicted."""
    cluster = inputs.cluster.with_device_count(devices) if devices else inputs.cluster
    if summary.trace is None:
        return None
    try:
        profile = summary.trace(plan.memory.recompute)
        return predict_plan(cluster, profile, plan, inputs.global_batch, inputs.optimizer, runtime=inputs.runtime)
    except InputError:
        return None


def _predicted(closest: _Closest, inputs: PlanningInputs) -> _Closest:
    """The same plan with what it needs, in place of a bound, if it can be predicted; with full recomputation if that
    needs less and keeps the constraints. A bound of weights and states excludes plans with any recomputation."""
    plans = [closest.plan]
    if any(piece.recomputable for piece in closest.summary.pieces):
        memory = closest.plan.memory.model_copy(update={"recompute": "full"})
        plans.append(closest.plan.model_copy(update={"memory": memory}))
    found = []
    for plan in plans:
        prediction = _predict(plan, inputs, closest.summary)
        if prediction is None or inputs.fits(prediction) or not keeps_constraints(plan, inputs.constraints):
            continue
        device = prediction.fullest_device or inputs.device
        found.append(_Closest(plan, prediction.memory.device_bytes, device, closest.summary))
    return min(found, key=lambda other: other.needed_bytes, default=closest)


def _what_would_help(closest: _Closest, inputs: PlanningInputs) -> str:
    larger = ceil(closest.needed_bytes / (1 - inputs.memory_margin) / 2**30)
    device = f"devices with {larger:,} GiB" if inputs.cluster.device_count > 1 else f"a device with {larger:,} GiB"
    fewer = ", or a smaller batch" if inputs.compares_samples else ""
    if inputs.cluster.is_uniform and (found := _on_more_devices(closest, inputs)):
        devices, plan, needed_bytes = found
        return (
            f"use {devices:,} {closest.device.name}, of each of which {plan.summary()} needs"
            f" {bytes_text(needed_bytes)}, or"
            f" {device}{fewer}"
        )
    parameters = closest.summary.profile.parameters
    weights = sum(parameter.bytes for parameter in parameters)
    trained = sum(parameter.bytes for parameter in parameters if parameter.trainable)
    states = weights + trained * (1 + inputs.optimizer.state_ratio)
    least = ceil(states / inputs.capacity_bytes) if inputs.capacity_bytes else 0
    if least <= inputs.cluster.device_count:
        return f"use {device}, smaller samples (shorter sequences, smaller images){fewer}"
    return (
        f"use more devices, or {device}{fewer}. Without offload, {least:,} devices of this kind are needed at least,"
        f" for weights, gradients and optimizer state of {bytes_text(states)}"
    )


def _on_more_devices(closest: _Closest, inputs: PlanningInputs) -> tuple[int, Plan, float] | None:
    """A number of devices that divides the batch and on which the model fits if all of them are shards, the smallest
    such number, with the plan and what it needs of a device; None if there is none."""
    counts = [number for number in divisors(inputs.global_batch) if _is_more(number, inputs)]
    found, low, high = None, 0, len(counts)
    while low < high:  # a device needs less memory with every device more
        middle = (low + high) // 2
        fitting = _fitting_shards(counts[middle], closest, inputs)
        if fitting is not None:
            found, high = (counts[middle], *fitting), middle
        else:
            low = middle + 1
    return found


def _fitting_shards(devices: int, closest: _Closest, inputs: PlanningInputs) -> tuple[Plan, float] | None:
    """The first plan of shards that fits on so many devices, with a sample in a microbatch: eager, or in compiled
    blocks, which need less memory; with what it needs of a device."""
    recompute = "full" if any(piece.recomputable for piece in closest.summary.pieces) else "none"
    can_compile = inputs.cluster.kind == "cuda" and inputs.allow != "same"
    for compiled in ("none", "blocks") if can_compile else ("none",):
        groups = {
            "axes": {"shard": devices},
            "memory": {"recompute": recompute, "accumulation": inputs.global_batch // devices},
            "numerics": {"precision": closest.plan.numerics.precision},
            "compute": {"compile": compiled},
        }
        plan = Plan.model_validate(groups)
        if not keeps_constraints(plan, inputs.constraints):
            continue
        prediction = _predict(plan, inputs, closest.summary, devices)
        if prediction is not None and prediction.memory.device_bytes <= inputs.capacity_bytes:
            return plan, prediction.memory.device_bytes
    return None


def _is_more(devices: int, inputs: PlanningInputs) -> bool:
    return inputs.cluster.device_count < devices <= _MOST_DEVICES
