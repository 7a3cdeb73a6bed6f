"""`plan_details`: everything that the page of a plan shows, as plain values for JSON. `plans/page.py` turns them into a
page, now or later."""

from collections.abc import Iterator
from typing import Any

from meshwright.cluster.cluster import Cluster, Device, Link
from meshwright.errors import MeshwrightError
from meshwright.numbers.units import bandwidth_text, bytes_text, count_text, seconds_text
from meshwright.planner.explanation.report import PlanReport
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.planner.search_result import SearchResult
from meshwright.report.cluster_drawing import cluster_values
from meshwright.report.plan_on_modules import plan_on_modules
from meshwright.report.plans.candidates import cloud_values
from meshwright.report.plans.memory import memory_values
from meshwright.report.plans.scaling import BUDGET_S, scaling_values
from meshwright.report.plans.step import exchange_values, timeline_values
from meshwright.simulator.rank_rows import row_names, step_timeline


def plan_details(
    report: PlanReport,
    result: SearchResult | None,
    inputs: PlanningInputs,
    profiles: Profiles,
    *,
    title: str,
    seconds: float,
    scaling_budget_s: float = BUDGET_S,
) -> dict[str, Any]:
    """Returns what the page of a plan shows. `result` is None for a plan that the user gave. `title` names the job or
    the model. Searching on smaller clusters takes at most about `scaling_budget_s`."""
    plan, prediction = report.ranked[0]
    profile = profiles.get(plan.numerics.precision, plan.memory.recompute)
    memory: dict[str, Any] | None = None
    try:
        memory = memory_values(profile, plan, prediction, inputs)
    except MeshwrightError:  # some plans of other programs have a prediction, but no replay
        memory = None
    return {
        **report.to_dict(),
        "kind": "plan",
        "title": title,
        "seconds": seconds,
        "sentences": list(report.explanation),
        "rejected_plans": [{"summary": rejected.summary(), "reason": words} for rejected, words in report.rejected],
        "global_batch": inputs.global_batch,
        "capacity_bytes": inputs.capacity_of(prediction.fullest_device or inputs.device),
        "device_bytes": [given.memory.device_bytes for _, given in report.ranked],
        "batch_per_rank": prediction.batch_per_rank,
        "method": profiles.method,
        "constants": [list(row) for row in _constants(inputs.cluster)],
        "cluster": cluster_values(inputs.cluster, plan),
        "cloud": cloud_values(result, inputs) if result is not None else [],
        "memory": memory,
        "timeline": timeline_values(step_timeline(prediction, plan), row_names(prediction)),
        "exchanges": exchange_values(profile, plan, prediction, inputs),
        "scaling": scaling_values(result, inputs, profiles, scaling_budget_s) if result is not None else [],
        "modules": plan_on_modules(profiles.model, plan, profile),
    }


def _constants(cluster: Cluster) -> Iterator[tuple[str, str, str, str]]:
    """The constants of the hardware that predictions use: of what, which, its value, and its source."""
    for node in cluster.nodes:
        yield from _device_constants(node.device)
        yield from _link_constants(node.link)
    if cluster.link is not None and sum(node.number for node in cluster.nodes) > 1:
        yield from _link_constants(cluster.link)


def _device_constants(device: Device) -> Iterator[tuple[str, str, str, str]]:
    sources = device.sources
    yield device.name, "memory", bytes_text(device.memory_bytes), sources.get("memory_bytes", "")
    bandwidth = bandwidth_text(device.bandwidth_bytes_per_s)
    yield device.name, "memory bandwidth", bandwidth, sources.get("bandwidth_bytes_per_s", "")
    for dtype, rate in device.rates.items():
        source = sources.get(f"rates.{dtype}", sources.get("rates", ""))
        yield device.name, f"matrix products in {dtype}", f"{count_text(rate)}FLOP/s", source
    if device.launch_s:
        yield device.name, "launch of an operator", seconds_text(device.launch_s), sources.get("launch_s", "")
    if device.operators:
        words = f"{len(device.operators):,} shapes"
        yield device.name, "measured operators", words, sources.get("operators", "")


def _link_constants(link: Link) -> Iterator[tuple[str, str, str, str]]:
    sources = link.sources
    if link.bandwidth_bytes_per_s:
        bandwidth = bandwidth_text(link.bandwidth_bytes_per_s)
        yield link.name, "bandwidth of a device", bandwidth, sources.get("bandwidth_bytes_per_s", "")
    if link.latency_s:
        yield link.name, "latency", seconds_text(link.latency_s), sources.get("latency_s", "")
    for collective, curves in link.curves.items():
        words = f"{sum(len(curve.points) for curve in curves):,} measured sizes"
        yield link.name, f"measured {collective.replace('_', '-')}", words, "; ".join({c.source for c in curves})
