"""How the job scales: the predicted speed of the best plan on 1, 2, 4, … devices of the same kind, with the same global
batch, and the ideal line."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.planner.search import search
from meshwright.planner.search_result import SearchResult
from meshwright.report.charts import NEUTRAL, SERIES_COLOURS, axis, figure, line
from meshwright.report.hover import hover_text, log_axis
from meshwright.report.page import Chart

BUDGET_S = 12.0  # no further search is begun after this time


def smaller_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """Yields clusters with 1, 2, 4, … devices, fewer than the cluster has; those of several machines have whole ones.
    Yields none if machines differ."""
    if len(cluster.nodes) > 1:
        return
    node, devices = cluster.nodes[0], 1
    while devices < cluster.device_count:
        if devices <= node.count:
            yield cluster.with_device_count(devices)
        elif devices % node.count == 0:
            fewer = node.model_copy(update={"number": devices // node.count})
            yield cluster.model_copy(update={"nodes": (fewer,)})
        devices *= 2


def scaling_values(
    result: SearchResult, inputs: PlanningInputs, profiles: Profiles, budget_s: float = BUDGET_S
) -> list[dict[str, Any]]:
    """Returns the best plan on each smaller cluster and on this one, as plain values. Clusters on which no plan fits
    have no step time. Searches that the time does not suffice for are left out."""
    begin, values = perf_counter(), []
    for cluster in smaller_clusters(inputs.cluster):
        if perf_counter() - begin > budget_s:
            break
        entry: dict[str, Any] = {"devices": cluster.device_count, "step_s": None, "plan": "no plan fits"}
        try:
            best = search(replace(inputs, cluster=cluster, top=1), profiles).ranked[0]
            entry |= {"step_s": best.prediction.step_s, "plan": best.plan.summary()}
        except InputError:  # no plan fits, or none divides the batch
            pass
        values.append(entry)
    best = result.ranked[0]
    devices = inputs.cluster.device_count
    values.append({"devices": devices, "step_s": best.prediction.step_s, "plan": best.plan.summary()})
    return values


def scaling_chart(details: Mapping[str, Any]) -> Chart | None:
    """Returns the chart of samples per second over the number of devices; None with fewer than two points."""
    points = [entry for entry in details.get("scaling") or [] if entry["step_s"]]
    batch = details.get("global_batch")
    if len(points) < 2 or not batch:
        return None
    devices = [entry["devices"] for entry in points]
    speeds = [batch / entry["step_s"] for entry in points]
    first = speeds[0] / devices[0]
    ideal = [first * number for number in devices]
    ticks = [entry["devices"] for entry in details["scaling"]]
    traces = [
        line("ideal", devices, ideal, "%{y:,.4g} samples per second", NEUTRAL)
        | {"mode": "lines", "line": {"dash": "dash", "color": NEUTRAL, "width": 1.5}},
        line(
            "predicted",
            devices,
            speeds,
            "%{x} devices: %{y:,.4g} samples per second, %{customdata[1]:.0%} of ideal<br>%{customdata[0]}",
            SERIES_COLOURS[0],
            customdata=[
                [hover_text(entry["plan"]), speed / best]
                for entry, speed, best in zip(points, speeds, ideal, strict=True)
            ],
        ),
    ]
    missing = [str(entry["devices"]) for entry in details["scaling"] if not entry["step_s"]]
    note = f"The global batch stays {batch:,} samples. The ideal line starts at {devices[0]:,}"
    note += " device." if devices[0] == 1 else " devices."
    if missing:
        note += f" No plan fits on {', '.join(missing)} devices."
    log = {"type": "log", "tickmode": "array"}
    return Chart(
        "Predicted speed on fewer devices, each with its own best plan",
        figure(
            traces,
            axis("devices", **log, tickvals=ticks, ticktext=[f"{number:,}" for number in ticks]),
            axis("samples per second", **log_axis(min(speeds), max(*speeds, *ideal))),
            showlegend=True,
        ),
        360,
        note,
    )
