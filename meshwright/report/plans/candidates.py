"""The candidates of a search as a cloud of points: predicted time against memory, with the plan and the reason why it
was not chosen."""

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.numbers.units import bytes_text, seconds_text
from meshwright.planner.candidates import Candidate
from meshwright.planner.explanation.explain import reason, too_large
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.search_result import SearchResult
from meshwright.report.charts import BAD, MUTED, NEUTRAL, SERIES_COLOURS, axis, figure
from meshwright.report.hover import hover_text, log_axis
from meshwright.report.page import Chart

GIB = 2**30
_FAR = 4.0  # a limit that is so many times as high as the highest point is not drawn, as all points would lie at 0
# How each group of candidates is drawn: its name, plotly's marker symbol, its size and its colour.
_GROUPS = {
    "not simulated": ("circle-open", 5, NEUTRAL),
    "too large": ("x", 6, NEUTRAL),
    "rejected": ("circle", 8, NEUTRAL),
    "ranked": ("diamond", 10, SERIES_COLOURS[0]),
    "chosen": ("star", 16, SERIES_COLOURS[5]),
}


def cloud_values(result: SearchResult, inputs: PlanningInputs) -> list[dict[str, Any]]:
    """Returns the points of the cloud as plain values: the simulated plans, and a bounded number of other
    candidates."""
    return [*_simulated(result, inputs), *_not_simulated(result, inputs)]


def _simulated(result: SearchResult, inputs: PlanningInputs) -> Iterator[dict[str, Any]]:
    best = result.ranked[0]
    ranked = {priced.candidate for priced in result.ranked}
    for priced in result.simulated:
        is_best = priced.candidate == best.candidate and priced.plan == best.plan
        fits = inputs.fits(priced.prediction)
        group = "chosen" if is_best else "ranked" if priced.candidate in ranked else "rejected" if fits else "too large"
        yield {
            "group": group,
            "plan": priced.plan.summary(),
            "step_s": priced.prediction.step_s,
            "memory_bytes": priced.needed_bytes,
            "reason": "the best plan" if is_best else reason(priced, best, inputs),
        }


def _not_simulated(result: SearchResult, inputs: PlanningInputs) -> Iterator[dict[str, Any]]:
    for bounded in result.not_simulated:
        is_large = bounded.memory_bytes > inputs.capacity_bytes
        guess = f"not simulated: a guess of its step is {seconds_text(bounded.guess_s)}"
        yield {
            "group": "too large" if is_large else "not simulated",
            "plan": _candidate_text(bounded.candidate),
            "step_s": bounded.guess_s,
            "memory_bytes": bounded.memory_bytes,
            "reason": too_large(bounded.memory_bytes, inputs, at_least=True) if is_large else guess,
        }


def _candidate_text(candidate: Candidate) -> str:
    """The choices of a candidate in one line, like the summary of a plan, which would take longer to create."""
    sizes = candidate.sizes
    axes = [f"{name} {size}" for name, size in sizes.axes.model_dump().items() if size > 1]
    choices = [
        (sizes.splits_wide_layers, "wide layers split"),
        (bool(sizes.placed_branches), f"{sizes.placed_branches} apart"),
        (sizes.pipeline > 1, f"{candidate.schedule}/{candidate.microbatches}"),
        (sizes.shard > 1 and sizes.sharding != "parameters", f"shard {sizes.sharding}"),
        (candidate.recompute != "none", f"recompute {candidate.recompute}"),
        (sizes.pipeline == 1 and candidate.microbatches > 1, f"accumulate {candidate.microbatches}"),
    ]
    words = [words for is_chosen, words in choices if is_chosen]
    return " · ".join([" × ".join(axes) or "one rank", candidate.precision, *words])


def cloud_chart(details: Mapping[str, Any]) -> Chart | None:
    """Returns the chart of the candidates; None if the plan was not searched for."""
    points = details.get("cloud") or []
    if not points:
        return None
    times = [point["step_s"] for point in points]
    unit_s, unit = (1.0, "s") if max(times) >= 1 else (1e-3, "ms")
    smallest, largest = min(times) / unit_s, max(times) / unit_s
    x = axis("predicted time of a step", unit, **(log_axis(smallest, largest) if largest > 5 * smallest else {}))
    fitting = [point["memory_bytes"] for point in points if point["group"] != "too large"]
    capacity, highest = details.get("capacity_bytes"), max(fitting or [point["memory_bytes"] for point in points])
    note, layout = "", {}
    if capacity and capacity < _FAR * highest:
        highest = max(highest, capacity)
        layout = _capacity_line(capacity)
    elif capacity:
        note = f" Far above all points is the limit: a plan may use {bytes_text(capacity)}."
    unit_bytes, bytes_unit = (GIB, "GiB") if highest >= GIB else (2**20, "MiB")
    for shape in (*layout.get("shapes", ()), *layout.get("annotations", ())):
        shape.update({key: shape[key] / unit_bytes for key in ("y", "y0", "y1") if key in shape})
    y = axis("memory of a device", bytes_unit, range=[0, 1.2 * highest / unit_bytes])
    units = (unit_s, unit, unit_bytes, bytes_unit)
    traces = [trace for group in _GROUPS if (trace := _trace(group, points, *units))]
    is_outside = any(point["memory_bytes"] > 1.2 * highest for point in points)
    note += " Plans that need still more memory are above the picture; zoom out to see them." if is_outside else ""
    return Chart(
        "All candidates: time of a step against memory of a device",
        figure(traces, x, y, **layout),
        460,
        "Each point is a plan; hover over it, or tap it, to see the plan and why it was not chosen. Candidates that"
        f" were not simulated are at a guess of their time and a lower bound of their memory.{note}",
    )


def _capacity_line(capacity: float) -> dict[str, Any]:
    """A dashed line at the memory that a plan may use, in bytes, with its text."""
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": capacity, "y1": capacity}
    text = {"xref": "paper", "x": 1, "xanchor": "right", "y": capacity, "yanchor": "bottom", "showarrow": False}
    return {
        "shapes": [line | {"line": {"color": BAD, "dash": "dash", "width": 1.5}}],
        "annotations": [text | {"text": f"a plan may use {bytes_text(capacity)}", "font": {"color": BAD}}],
    }


def _trace(
    group: str, points: list[Mapping[str, Any]], unit_s: float, unit: str, unit_bytes: float, bytes_unit: str
) -> dict[str, Any] | None:
    members = [point for point in points if point["group"] == group]
    if not members:
        return None
    symbol, size, colour = _GROUPS[group]
    line = {"width": 1, "color": MUTED}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{group} ({len(members):,})" if group != "chosen" else group,
        "x": [point["step_s"] / unit_s for point in members],
        "y": [point["memory_bytes"] / unit_bytes for point in members],
        "customdata": [[hover_text(point["plan"]), hover_text(point["reason"])] for point in members],
        "hovertemplate": f"<b>%{{customdata[0]}}</b><br>%{{x:.4g}} {unit}, %{{y:.3g}} {bytes_unit}"
        "<br>%{customdata[1]}<extra></extra>",
        "marker": {"symbol": symbol, "size": size, "color": colour, "opacity": 0.85, "line": line},
    }
