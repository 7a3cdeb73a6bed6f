"""The page of an answer: what `meshwright ask` says to a question, as a chart and a table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.numbers.units import bytes_text, seconds_text
from meshwright.report.charts import NEUTRAL, axis, bars, colour, figure, line
from meshwright.report.hover import hover_text
from meshwright.report.page import Chart, Page, Section, Table

_TITLES = {
    "sweep": "How it scales",
    "largest_batch": "The largest batch",
    "goal": "Which cluster",
    "what-if": "What would change",
    "difference": "Two plans",
    "bottleneck": "What limits the job",
    "slower_run": "Predicted and measured",
}


def question_page(values: Mapping[str, Any]) -> Page:
    """Returns the page of an answer, which is the JSON that the command prints."""
    question = str(values["question"])
    charts = _CHARTS[question](values)
    section = Section(_TITLES[question], str(values["explanation"]), [*charts, *_tables(values)])
    return Page(_TITLES[question], str(values.get("title", "")), [section])


def _sweep_charts(values: Mapping[str, Any]) -> Iterator[Chart]:
    name = str(values["over"])
    sets = [("best plan", values["rows"]), *((f"with {s['change']}", s["rows"]) for s in values.get("what_if", []))]
    points = [(label, [row for row in rows if row["step_s"]]) for label, rows in sets]
    numbers = name in ("devices", "nodes", "batch", "sequence")
    x_axis = axis(name, **({"type": "log"} if numbers else {"type": "category"}))

    def x(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [int(row["value"]) if numbers else str(row["value"]) for row in rows]

    speed = [
        line(
            label,
            x(rows),
            [row["samples_per_s"] for row in rows],
            "%{x}: %{y:,.4g} samples per second<br>%{customdata}",
            colour(number),
            customdata=[hover_text(row["summary"]) for row in rows],
        )
        for number, (label, rows) in enumerate(points)
    ]
    first = points[0][1]
    if name in ("devices", "nodes") and first:
        each = first[0]["samples_per_s"] / first[0]["devices"]
        ideal = [each * row["devices"] for row in first]
        speed.append(line("ideal", x(first), ideal, "%{y:,.4g} samples per second", NEUTRAL))
    yield Chart("Samples per second", figure(speed, x_axis, axis("samples per second", type="log"), showlegend=True))
    shares = [
        line(label, x(rows), [row["efficiency"] for row in rows], "%{x}: %{y:.0%}", colour(number))
        for number, (label, rows) in enumerate(points)
    ]
    share_axis = axis("speed of a device, share of the first", tickformat=".0%", rangemode="tozero")
    yield Chart("Efficiency", figure(shares, x_axis, share_axis, showlegend=True))


def _batch_charts(values: Mapping[str, Any]) -> Iterator[Chart]:
    rows = values["rows"]
    traces = [
        {
            **line(
                "plans",
                [row["global_batch"] for row in rows],
                [row["samples_per_s"] for row in rows],
                "batch %{x:,}: %{y:,.4g} samples per second<br>%{customdata}",
                colour(0),
                customdata=[hover_text(row["summary"]) for row in rows],
            ),
            "mode": "markers",
        }
    ]
    axes = axis("largest global batch", type="log"), axis("samples per second", rangemode="tozero")
    yield Chart("The largest batch of each plan", figure(traces, *axes))


def _goal_charts(values: Mapping[str, Any]) -> Iterator[Chart]:
    rows = [row for row in values["rows"] if row["run_s"] is not None]
    traces = [
        {
            **line(
                "clusters",
                [row["run_s"] / 3600 for row in rows],
                [row["run_cost"] if row["run_cost"] is not None else row["devices"] for row in rows],
                "%{text}: %{x:,.4g} hours, %{y:,.4g}",
                colour(0),
            ),
            "mode": "markers+text",
            "text": [row["cluster"] for row in rows],
            "textposition": "top center",
        }
    ]
    y = "cost" if any(row["run_cost"] is not None for row in rows) else "devices"
    yield Chart("Time of the run and its cost", figure(traces, axis("time", "hours"), axis(y, rangemode="tozero")))


def _change_charts(values: Mapping[str, Any]) -> Iterator[Chart]:
    rows = [row for row in values["rows"] if row["step_s"]]
    if rows:
        speeds, names = [row["samples_per_s"] for row in rows], [row["change"] for row in rows]
        traces = [bars("samples per second", speeds, names, "%{y}: %{x:,.4g}", colour(0), horizontal=True)]
        yield Chart("Samples per second", figure(traces, axis("samples per second"), axis("")), 260)


def _difference_charts(values: Mapping[str, Any]) -> Iterator[Chart]:
    rows = values["rows"]
    traces = [
        bars(
            row["term"],
            [row["first_s"] * 1e3, row["second_s"] * 1e3],
            ["first", "second"],
            "%{y}: %{x:.4g} ms",
            colour(number),
            horizontal=True,
        )
        for number, row in enumerate(rows)
    ]
    yield Chart("A step of both plans", figure(traces, axis("time of a step", "ms"), axis(""), barmode="stack"), 260)


def _bottleneck_charts(values: Mapping[str, Any]) -> Iterator[Chart]:
    rows = [row for row in values["rows"] if row["seconds"] > 0]
    if rows:
        names, times = [row["limit"] for row in rows], [row["seconds"] * 1e3 for row in rows]
        traces = [bars("step", times, names, "%{y}: %{x:.4g} ms", colour(0), horizontal=True)]
        yield Chart("What the step is limited by", figure(traces, axis("time of a step", "ms"), axis("")), 260)


def _run_charts(values: Mapping[str, Any]) -> Iterator[Chart]:
    kinds = list(values["predicted"])
    names = ["predicted", *(f"rank {row['rank']}" for row in values["rows"])]
    sources = [values["predicted"], *values["rows"]]
    traces = [
        bars(kind, names, [source[kind] * 1e3 for source in sources], "%{x}: %{y:.4g} ms", colour(number))
        for number, kind in enumerate(kinds)
    ]
    yield Chart("A step of every rank", figure(traces, axis(""), axis("time of a step", "ms"), barmode="stack"))


_CHARTS = {
    "sweep": _sweep_charts,
    "largest_batch": _batch_charts,
    "goal": _goal_charts,
    "what-if": _change_charts,
    "difference": _difference_charts,
    "bottleneck": _bottleneck_charts,
    "slower_run": _run_charts,
}


_HEADERS = {
    "step_s": "step",
    "samples_per_s": "samples/s",
    "memory_bytes": "memory of tensors",
    "device_bytes": "memory of a device",
    "summary": "plan",
    "first_s": "first",
    "second_s": "second",
    "difference_s": "difference",
    "epoch_s": "epoch",
    "epoch_cost": "cost of an epoch",
    "billion_tokens_cost": "cost of 10⁹ tokens",
    "run_s": "whole run",
    "run_cost": "cost",
    "is_possible": "within the limits",
    "is_limited": "a larger batch was tried",
    "seconds": "time",
}


def _tables(values: Mapping[str, Any]) -> Iterator[Table]:
    """The rows, without nested values."""
    rows = [{key: value for key, value in row.items() if not isinstance(value, dict | list)} for row in values["rows"]]
    kinds = values.get("predicted", {})  # of time, in the answer about a run
    if kinds:
        rows.insert(0, {"rank": "predicted", **kinds})
    if rows:
        header = list(dict.fromkeys(key for row in rows for key in row))
        yield Table(
            [_HEADERS.get(key, key.replace("_", " ")) for key in header],
            [[_cell(key, row.get(key), key in kinds) for key in header] for row in rows],
        )


def _cell(key: str, value: Any, is_time: bool) -> Any:
    if value is None or isinstance(value, bool):
        return "–" if value is None else "yes" if value else "no"
    if key.endswith("_bytes"):
        return bytes_text(value)
    if is_time or key == "seconds" or (key.endswith("_s") and not key.endswith("per_s")):
        return seconds_text(value)
    if key in ("efficiency", "share"):
        return f"{value:.0%}"
    return value
