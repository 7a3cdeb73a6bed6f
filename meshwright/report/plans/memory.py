"""The memory of a predicted step: over time by kind, what is alive at the peak, and the peak of each pipeline rank."""

from collections.abc import Mapping
from typing import Any

from meshwright.numbers.units import bytes_text
from meshwright.plan import Plan
from meshwright.planner.inputs import PlanningInputs
from meshwright.profile.values import ModelProfile, Operator
from meshwright.report.charts import BAD, INK, NEUTRAL, SERIES_COLOURS, axis, bars, figure
from meshwright.report.page import Cell, Chart, Table
from meshwright.report.plans.step import time_unit
from meshwright.simulator.compute.chunked_loss import chunked_profile
from meshwright.simulator.compute.compiled_profile import compiled_profile
from meshwright.simulator.compute.operator_time import operator_s
from meshwright.simulator.context import rank_memory_profile, without_context
from meshwright.simulator.memory.history import MemoryHistory, memory_histories
from meshwright.simulator.memory.peak import MemoryPrediction, rank_memories
from meshwright.simulator.predict import Prediction, device_memory
from meshwright.simulator.runtime import OUR_RUNTIME
from meshwright.simulator.step_inputs import rank_device, slowest_node

GIB = 2**30
_MOST_RANKS = 64
_MOST_ALIVE = 20
_SMALL = 0.005  # kinds that never reach this share of the peak are drawn as one
_OTHER = "other"
_ROLES = {"saved": "activation"}
# A kind has the same colour on every page. Kinds that are not listed here are small.
_COLOURS = {
    "weights": SERIES_COLOURS[0],
    "optimizer state": SERIES_COLOURS[1],
    "gradients": SERIES_COLOURS[2],
    "gradient buckets": SERIES_COLOURS[2],
    "gathered weights": SERIES_COLOURS[3],
    "activations": SERIES_COLOURS[4],
    "temporaries": SERIES_COLOURS[5],
    "reduction buffers": SERIES_COLOURS[6],
    "workspace": SERIES_COLOURS[7],
}


def memory_values(profile: ModelProfile, plan: Plan, prediction: Prediction, inputs: PlanningInputs) -> dict[str, Any]:
    """Returns the memory of the rank that needs most over one step, what is alive at its peak, and the peak of each
    pipeline rank, as plain values."""
    batch = prediction.batch_per_rank / plan.axes.context
    device = device_memory(inputs.cluster, inputs.checkpoint_copies)
    optimizer = inputs.optimizer.fused() if plan.compute.fused_optimizer else inputs.optimizer
    divided = rank_memory_profile(profile, plan)
    executed = compiled_profile(chunked_profile(divided, plan.compute.loss_chunks), plan, batch)
    speeds = rank_device(slowest_node(inputs.cluster.nodes, plan), plan, OUR_RUNTIME).speeds

    def seconds(operator: Operator, backward: bool) -> float:
        return operator_s(operator, batch, speeds, backward, profile.precision == "tf32")

    arguments = (executed, without_context(plan), batch, optimizer, device)
    ranks = rank_memories(*arguments)
    histories = memory_histories(*arguments, seconds, prediction.timeline)
    most = max(range(len(histories)), key=lambda rank: ranks[rank].allocated_bytes)
    return {
        "rank": most,
        "context_bytes": device.context_bytes,
        "peak_at": ranks[most].peak_at,
        "points": _points(histories[most], prediction),
        "alive": _alive(histories[most]),
        "ranks": [_rank_values(rank) for rank in ranks[:_MOST_RANKS]],
        "ranks_in_all": len(ranks),
    }


def _alive(history: MemoryHistory) -> list[list[Any]]:
    """The tensors that are alive at the peak, [layer, role, bytes]: the largest, and the sum of all others."""
    alive = [list(item) for item in history.alive_at_peak]
    others = alive[_MOST_ALIVE:]
    if not others:
        return alive
    return [*alive[:_MOST_ALIVE], [f"{len(others):,} others", "", sum(item[2] for item in others)]]


def _points(history: MemoryHistory, prediction: Prediction) -> dict[str, Any]:
    """The points of a history by column. The times of operators are stretched such that the optimizer step begins when
    it is predicted to, because they do not include launches and exchanges."""
    optimizer_s = prediction.breakdown.get("optimizer", 0.0)
    last_s = max((point.at_s for point in history.points), default=0.0)
    stretch = (prediction.step_s - optimizer_s) / last_s if last_s else 1.0
    at_s = [point.at_s * stretch for point in history.points]
    kinds = dict.fromkeys(kind for point in history.points for kind in point.bytes_by_kind)
    bytes_by_kind = {kind: [point.bytes_by_kind.get(kind, 0) for point in history.points] for kind in kinds}
    where = [point.where for point in history.points]
    if optimizer_s and at_s:  # the optimizer step lasts until the end
        at_s.append(prediction.step_s)
        where.append(where[-1])
        for sizes in bytes_by_kind.values():
            sizes.append(sizes[-1])
    return {"at_s": at_s, "where": where, "bytes": bytes_by_kind}


def _rank_values(memory: MemoryPrediction) -> dict[str, Any]:
    return {
        "breakdown": memory.breakdown,
        "allocated_bytes": memory.allocated_bytes,
        "device_bytes": memory.device_bytes,
        "peak_at": memory.peak_at,
    }


def memory_parts(details: Mapping[str, Any]) -> list[Chart | Table]:
    """Returns the charts and the table of the memory of the best plan; empty if it is not known."""
    values = details.get("memory")
    if not values:
        return []
    parts: list[Chart | Table] = [_history_chart(values, details)]
    if values["ranks_in_all"] > 1:
        parts.append(_ranks_chart(values, details))
    if values["alive"]:
        parts.append(_alive_table(values))
    return parts


def _merged(series: Mapping[str, list[float]], peak: float) -> dict[str, list[float]]:
    """The series in GiB, with small ones added up as one."""
    merged: dict[str, list[float]] = {}
    for kind, sizes in series.items():
        name = kind if max(sizes, default=0) >= _SMALL * peak else _OTHER
        before = merged.pop(name, [0.0] * len(sizes))
        merged[name] = [earlier + size / GIB for earlier, size in zip(before, sizes, strict=True)]
    return {name: sizes for name, sizes in merged.items() if any(sizes)}


def _colour(kind: str) -> str:
    return _COLOURS.get(kind, NEUTRAL)


def _history_chart(values: Mapping[str, Any], details: Mapping[str, Any]) -> Chart:
    points = values["points"]
    totals = [sum(sizes) for sizes in zip(*points["bytes"].values(), strict=True)]
    peak = max(range(len(totals)), key=totals.__getitem__)
    unit_s, unit = time_unit(max(points["at_s"]))
    times = [at_s / unit_s for at_s in points["at_s"]]
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": times,
            "y": sizes,
            "customdata": points["where"],
            "stackgroup": "memory",
            "line": {"width": 0.5, "color": _colour(name), "shape": "hv"},
            "fillcolor": _colour(name),
            "hovertemplate": f"%{{fullData.name}}: %{{y:.3g}} GiB<br>%{{customdata}}, %{{x:.4g}} {unit}<extra></extra>",
        }
        for name, sizes in _merged(points["bytes"], totals[peak]).items()
    ]
    at_peak = {"x": times[peak], "y": totals[peak] / GIB, "text": f"peak {bytes_text(totals[peak])}", "showarrow": True}
    annotation = at_peak | {"arrowcolor": INK, "ax": 40 if times[peak] < times[-1] / 2 else -40, "ay": -24}
    pipeline = f" of pipeline rank {values['rank']}" if values["ranks_in_all"] > 1 else ""
    note = f"The peak{pipeline} is in the {values['peak_at']}."
    if values["context_bytes"]:
        note += f" The driver's context takes {bytes_text(values['context_bytes'])} more."
    if details["best"]["plan"]["memory"]["accumulation"] > 1:
        note += " Of the microbatches that are accumulated, the last one is drawn over the whole time."
    return Chart(
        f"Memory in one step{pipeline}, by kind",
        figure(
            traces,
            axis("time from the start of the step", unit),
            axis("allocated memory", "GiB", rangemode="tozero", range=[0, 1.15 * totals[peak] / GIB]),
            annotations=[annotation],
            showlegend=True,
        ),
        400,
        note,
    )


def _ranks_chart(values: Mapping[str, Any], details: Mapping[str, Any]) -> Chart:
    ranks = values["ranks"]
    peak = max(rank["allocated_bytes"] for rank in ranks)
    kinds = dict.fromkeys(kind for rank in ranks for kind in rank["breakdown"])
    series = {kind: [rank["breakdown"].get(kind, 0) for rank in ranks] for kind in kinds}
    names = [f"rank {number}" for number in range(len(ranks))]
    traces = [
        bars(name, names, sizes, "%{x}: %{y:.3g} GiB", _colour(name)) for name, sizes in _merged(series, peak).items()
    ]
    layout: dict[str, Any] = {"barmode": "stack", "showlegend": True}
    capacity = details.get("capacity_bytes")
    if capacity and capacity < 3 * peak:
        line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": capacity / GIB, "y1": capacity / GIB}
        layout["shapes"] = [line | {"line": {"color": BAD, "dash": "dash", "width": 1.5}}]
    note = "The dashed line is what a plan may use of a device." if "shapes" in layout else ""
    if values["ranks_in_all"] > len(ranks):
        note += f" The first {len(ranks)} of {values['ranks_in_all']:,} ranks are drawn."
    by_branches = bool(details["best"]["plan"]["modules"]["branches"])
    kind = "rank of the tensor axis" if by_branches else "pipeline rank"
    return Chart(
        f"Peak of each {kind}, by kind",
        figure(traces, axis(kind, type="category"), axis("allocated memory at the peak", "GiB"), **layout),
        360,
        note.strip(),
    )


def _alive_table(values: Mapping[str, Any]) -> Table:
    total = sum(size for _, _, size in values["alive"]) or 1.0
    rows = [
        (
            layer or "the model itself",
            _ROLES.get(role, role),
            Cell(bytes_text(size), size),
            Cell(f"{size / total:.1%}", size),
        )
        for layer, role, size in values["alive"]
    ]
    note = (
        "Tensors are listed by the layer that allocated them. Weights, gradients and optimizer state are in the chart."
    )
    return Table(
        ("layer", "kind", "bytes", "share"), rows, "Activations and temporaries that are alive at the peak", note
    )
