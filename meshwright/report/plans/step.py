"""Where the time of a predicted step goes: its parts, the timeline of a pipeline, and the exchanges between ranks."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from meshwright.numbers.units import bytes_text, seconds_text
from meshwright.plan import Plan
from meshwright.planner.inputs import PlanningInputs
from meshwright.profile.values import ModelProfile
from meshwright.report.charts import NEUTRAL, SERIES_COLOURS, axis, bars, colour, figure
from meshwright.report.hover import hover_text
from meshwright.report.page import Cell, Chart, Table
from meshwright.simulator.communication.collectives import collective_s
from meshwright.simulator.communication.combining import combine_s
from meshwright.simulator.communication.placement import RankGroup, group_of_axes, neighbour_groups
from meshwright.simulator.pipeline.timeline import Timeline
from meshwright.simulator.predict import Prediction
from meshwright.simulator.traffic import Exchange, exchanges

TERMS = {
    "compute": ("computing", SERIES_COLOURS[0]),
    "launch": ("launching operators", SERIES_COLOURS[4]),
    "optimizer": ("optimizer step", SERIES_COLOURS[2]),
    "tensor": ("exchange of split layers", SERIES_COLOURS[1]),
    "replicate": ("combining gradients of replicas", SERIES_COLOURS[5]),
    "shard": ("gathering and scattering shards", SERIES_COLOURS[3]),
    "pipeline": ("sending between stages", SERIES_COLOURS[6]),
    "expert": ("sending tokens to experts", SERIES_COLOURS[6]),
    "offload": ("copies from and to CPU memory", SERIES_COLOURS[7]),
    "input": ("reading input", SERIES_COLOURS[7]),
    "bubble": ("waiting (bubble)", NEUTRAL),
}
_MOST_RANKS = 16  # of a pipeline that are drawn
_MOST_EVENTS = 4000
_MOST_BARS = 8
_KINDS = {
    "forward": ("forward", SERIES_COLOURS[0]),
    "backward": ("backward", SERIES_COLOURS[1]),
    "input_backward": ("backward, of inputs", SERIES_COLOURS[1]),
    "weight_backward": ("backward, of weights", SERIES_COLOURS[2]),
}
_SIZES = (2**10, 2**14, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28)


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit in which times up to `seconds` are easiest to read: its seconds and its name."""
    return (1.0, "s") if seconds >= 2 else (1e-3, "ms") if seconds >= 2e-3 else (1e-6, "µs")


def breakdown_chart(details: Mapping[str, Any]) -> Chart:
    """Returns one bar for each ranked plan, whose parts add up to the predicted step."""
    plans = details["ranked"][:_MOST_BARS]
    unit_s, unit = time_unit(max(entry["step_s"] for entry in plans))
    labels = [f"plan {number + 1}" for number in range(len(plans))]
    traces = []
    for name, (words, bar_colour) in TERMS.items():
        seconds = [entry["breakdown"].get(name, 0.0) for entry in plans]
        if not any(seconds):
            continue
        custom = [
            [value / entry["step_s"], hover_text(entry["summary"])] for value, entry in zip(seconds, plans, strict=True)
        ]
        traces.append(
            bars(
                words,
                [value / unit_s for value in seconds],
                labels,
                f"%{{x:.4g}} {unit}, %{{customdata[0]:.1%}} of the step<br>%{{customdata[1]}}",
                bar_colour,
                horizontal=True,
                customdata=custom,
            )
        )
    return Chart(
        "The parts of a step add up to the predicted time",
        figure(
            traces,
            axis("predicted time", unit),
            axis("", autorange="reversed", type="category"),
            barmode="stack",
            showlegend=True,
        ),
        170 + 34 * len(plans),
        ("Plan 1 is the best; the table of ranked plans below has the others. " if len(plans) > 1 else "")
        + "Exchanges that overlap with computing are not part of the bars.",
    )


def timeline_values(timeline: Timeline | None, names: Sequence[str] = ()) -> dict[str, Any] | None:
    """Returns the actions of a timeline as plain values: [rank, kind, stage, microbatch, start, end]. Of many ranks,
    some are left out; None without a timeline. `names` are those of the rows, if ranks are not alike."""
    if timeline is None:
        return None
    ranks = len(timeline.order)
    shown = sorted({round(number * (ranks - 1) / (_MOST_RANKS - 1)) for number in range(_MOST_RANKS)})
    shown = list(range(ranks)) if ranks <= _MOST_RANKS else shown
    events = [
        [event.rank, event.kind, event.stage, event.microbatch, event.start_s, event.end_s]
        for event in timeline.events()
        if event.rank in shown
    ]
    limit_s = timeline.span_s
    if len(events) > _MOST_EVENTS:
        limit_s = sorted(event[5] for event in events)[_MOST_EVENTS]  # type: ignore[assignment]
        events = [event for event in events if event[5] <= limit_s]  # type: ignore[operator]
    return {
        "ranks": ranks,
        "shown": shown,
        "rows": [names[rank] if names else f"rank {rank}" for rank in shown],
        "span_s": timeline.span_s,
        "drawn_s": limit_s,
        "microbatches": 1 + max(action.microbatch for actions in timeline.order for action in actions),
        "busy_s": [timeline.busy_s[rank] for rank in shown],
        "events": events,
    }


def timeline_chart(details: Mapping[str, Any]) -> Chart | None:
    """Returns the timeline of the best plan: one row per rank of its pipeline, or per kind of data rank, with its
    passes and its waiting."""
    values = details.get("timeline")
    if not values or not values["events"]:
        return None
    rows = [hover_text(name) for name in values.get("rows") or [f"rank {rank}" for rank in values["shown"]]]
    names = dict(zip(values["shown"], rows, strict=True))
    unit_s, unit = time_unit(values["drawn_s"])
    traces = []
    for kind, (words, bar_colour) in _KINDS.items():
        members = [event for event in values["events"] if event[1] == kind]
        if members:
            hover = f"stage %{{customdata[0]}}, microbatch %{{customdata[1]}}: %{{x:.3g}} {unit}"
            traces.append(
                _spans(words, [(names[e[0]], e[4], e[5]) for e in members], unit_s, hover, bar_colour)
                | {"customdata": [[event[2], event[3]] for event in members]}
            )
    idle = _idle_spans(values)
    if idle:
        waits = [(names[rank], start, end) for rank, start, end in idle]
        traces.append(_spans("waiting (bubble)", waits, unit_s, f"waits %{{x:.3g}} {unit}", NEUTRAL))
    waiting = [1 - busy_s / values["span_s"] for busy_s in values["busy_s"]]
    note = f"A rank waits {min(waiting):.1%} to {max(waiting):.1%} of the time of all passes."
    if values["ranks"] > len(rows):
        note += f" {len(rows)} of {values['ranks']:,} pipeline ranks are drawn."
    if values["drawn_s"] < values["span_s"]:
        note += f" The picture ends after {seconds_text(values['drawn_s'])} of {seconds_text(values['span_s'])}."
    plan = details["best"]["plan"]
    if values["microbatches"] < plan["pipeline"]["microbatches"]:
        note += (
            f" {values['microbatches']:,} microbatches are drawn; once the pipeline is full, further ones repeat the"
            " same pattern."
        )
    return Chart(
        "Timeline of the pipeline" if plan["axes"]["pipeline"] > 1 else "Timeline of the passes on each kind of device",
        figure(
            traces,
            axis("time from the start of the step", unit),
            axis("", type="category", categoryorder="array", categoryarray=rows, autorange="reversed"),
            barmode="overlay",
            bargap=0.15,
            showlegend=True,
        ),
        150 + 26 * len(rows),
        note,
    )


def _spans(
    name: str, spans: Sequence[tuple[str, float, float]], unit_s: float, hover: str, bar_colour: str
) -> dict[str, Any]:
    """Bars from a start to an end, in named rows."""
    trace = bars(
        name,
        [(end - start) / unit_s for _, start, end in spans],
        [row for row, _, _ in spans],
        hover,
        bar_colour,
        horizontal=True,
        base=[start / unit_s for _, start, _ in spans],
    )
    trace["marker"] = {"color": bar_colour, "line": {"width": 0.5, "color": "var(--ground)"}}
    return trace


def _idle_spans(values: Mapping[str, Any]) -> list[tuple[int, float, float]]:
    spans: list[tuple[int, float, float]] = []
    least_s = 1e-4 * values["drawn_s"]
    for rank in values["shown"]:
        times = sorted((event[4], event[5]) for event in values["events"] if event[0] == rank)
        edges = [(0.0, 0.0), *times, (values["drawn_s"], values["drawn_s"])]
        spans += [(rank, end, start) for (_, end), (start, _) in pairwise(edges) if start - end > least_s]
    return spans


def exchange_values(
    profile: ModelProfile, plan: Plan, prediction: Prediction, inputs: PlanningInputs
) -> list[dict[str, Any]]:
    """Returns the collectives of a step of the rank that exchanges most, as plain values. `seconds` is the time of one
    of them if nothing else runs."""
    ranks = range(plan.axes.pipeline) if plan.axes.pipeline > 1 else range(1)
    by_rank = [exchanges(profile, plan, prediction.batch_per_rank, pipeline_rank=rank) for rank in ranks]
    most = max(by_rank, key=lambda items: sum(item.bytes * item.count for item in items))
    return [
        {
            "axis": item.axis,
            "collective": item.collective,
            "bytes": item.bytes,
            "count": item.count,
            "ranks": _group(item, plan, inputs).ranks,
            "seconds": _seconds(item, plan, inputs),
        }
        for item in most
    ]


def _group(item: Exchange, plan: Plan, inputs: PlanningInputs) -> RankGroup:
    if item.collective == "point_to_point" and item.axis == "pipeline":
        return max(neighbour_groups(plan.axes, inputs.cluster), key=lambda group: group.nodes)
    axes = ("replicate", "shard", "context") if item.axis == "data" else (item.axis,)
    return group_of_axes(plan.axes, axes, inputs.cluster)


def _seconds(item: Exchange, plan: Plan, inputs: PlanningInputs) -> float:
    group = _group(item, plan, inputs)
    if item.axis == "replicate" and item.collective == "all_reduce":
        return combine_s(item.bytes, group, plan.gradients.algorithm, inputs.cluster)
    return collective_s(item.collective, item.bytes, group, inputs.cluster)


def exchange_parts(details: Mapping[str, Any]) -> list[Chart | Table]:
    """Returns a chart and a table of the exchanges by size; empty if ranks exchange nothing."""
    items = details.get("exchanges") or []
    if not items:
        return []
    kinds = sorted({(item["axis"], item["collective"]) for item in items})
    names = [_bin_name(number) for number in range(len(_SIZES) + 1)]
    used = sorted({_bin(item["bytes"]) for item in items})
    shown = range(used[0], used[-1] + 1)
    largest = sum(item["bytes"] * item["count"] for item in items)
    unit_bytes, unit = (2**30, "GiB") if largest >= 4 * 2**30 else (2**20, "MiB")
    traces = []
    for number, (mesh_axis, collective) in enumerate(kinds):
        sums = dict.fromkeys(shown, 0.0)
        for item in items:
            if (item["axis"], item["collective"]) == (mesh_axis, collective):
                sums[_bin(item["bytes"])] += item["bytes"] * item["count"]
        traces.append(
            bars(
                f"{collective.replace('_', '-')} over {mesh_axis}",
                [names[place] for place in shown],
                [sums[place] / unit_bytes for place in shown],
                f"messages of %{{x}}: %{{y:,.4g}} {unit} per step",
                colour(number),
            )
        )
    chart = Chart(
        "Exchanges by the size of a message",
        figure(
            traces,
            axis("size of one message", type="category"),
            axis("exchanged per step", unit),
            barmode="stack",
            bargap=max(0.2, 1 - 0.16 * len(shown)),
            showlegend=True,
        ),
        340,
        "The bytes are those of the whole tensor that a collective combines, for the rank that exchanges most.",
    )
    header = ("axis", "collective", "ranks", "size", "times a step", "per step", "time of one", "time of all")
    rows = [
        (
            item["axis"],
            item["collective"].replace("_", "-"),
            item["ranks"],
            Cell(bytes_text(item["bytes"]), item["bytes"]),
            item["count"],
            Cell(bytes_text(item["bytes"] * item["count"]), item["bytes"] * item["count"]),
            Cell(seconds_text(item["seconds"]), item["seconds"]),
            Cell(seconds_text(item["seconds"] * item["count"]), item["seconds"] * item["count"]),
        )
        for item in items
    ]
    note = "Times are predicted for each collective alone. In a step, most of them overlap with computing."
    return [chart, Table(header, rows, note=note)]


def _bin(size: float) -> int:
    return sum(size >= limit for limit in _SIZES)


def _bin_name(number: int) -> str:
    if number == 0:
        return f"below {bytes_text(_SIZES[0])}"
    low = bytes_text(_SIZES[number - 1])
    return f"{low} and more" if number == len(_SIZES) else f"{low} – {bytes_text(_SIZES[number])}"
