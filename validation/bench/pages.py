"""The pages of what `python -m validation.bench` writes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files.foreign import parse_json, read_bytes
from meshwright.numbers.units import bandwidth_text, bytes_text, number_text, seconds_text
from meshwright.report.benches.page import ratio_cell, ratio_chart
from meshwright.report.charts import SERIES_COLOURS, axis, colour, figure, line
from meshwright.report.hover import log_axis
from meshwright.report.page import Cell, Chart, KeyFigures, Page, Section, Table
from validation.bench.faults.page import fault_sections

Row = Mapping[str, Any]


def page_of(file: Path) -> Page:
    """The page of a file that one of the commands has written."""
    return bench_page(parse_json(read_bytes(file).decode()))


def bench_page(report: Mapping[str, Any]) -> Page:
    rows = report.get("rows") or []
    for title, fields, sections in _KINDS:
        if rows and all(field in row for row in rows for field in fields):
            return Page(title, f"python -m validation.bench {title.split()[-1].lower()}", sections(report))
    raise InputError("these are not the rows of a measurement of peers, collectives or faults")


def _collectives(report: Mapping[str, Any]) -> list[Section]:
    rows: Sequence[Row] = report["rows"]
    times = [row["time_s"] for row in rows]
    sizes = sorted({row["bytes"] for row in rows})
    traces = []
    for number, algorithm in enumerate(dict.fromkeys(row["algorithm"] for row in rows)):
        members = sorted((row for row in rows if row["algorithm"] == algorithm), key=lambda row: row["bytes"])
        traces.append(_collective_trace(algorithm, members, number))
    predicted = [row for row in rows if row.get("predicted_s")]
    unit = [row["predicted_s"] * 1e6 for row in predicted]
    limits = (min(times) * 1e6, max(times) * 1e6)
    ticks: dict[str, Any] = {"tickvals": sizes, "ticktext": [bytes_text(size) for size in sizes]}
    chart = Chart(
        "Time of an all-reduce over the size of the tensor",
        figure(
            traces,
            axis("size of the tensor", type="log", tickmode="array", tickangle=-40, **ticks),
            axis("time, the median of the rounds", "µs", **log_axis(*limits)),
            showlegend=True,
        ),
        460,
        "The thin lines are the shortest and the longest round.",
    )
    parts: list[Any] = [chart]
    if predicted:
        measured = [row["time_s"] * 1e6 for row in predicted]
        ends = [min(*unit, *measured), max(*unit, *measured)]
        parts.append(_predicted_chart(predicted, ends))
    header = ("algorithm", "ranks", "size", "time", "shortest", "longest", "bandwidth", "against native", "predicted")
    table = Table(
        header,
        [
            (
                row["algorithm"],
                row["ranks"],
                Cell(bytes_text(row["bytes"]), row["bytes"]),
                Cell(seconds_text(row["time_s"]), row["time_s"]),
                *(Cell(seconds_text(value), value) for value in row["spread"]),
                Cell(bandwidth_text(row["bandwidth_bytes_per_s"]), row["bandwidth_bytes_per_s"]),
                ratio_cell(row.get("ratio_to_native")),
                Cell(seconds_text(row["predicted_s"]), row["predicted_s"]) if row.get("predicted_s") else None,
            )
            for row in rows
        ],
    )
    names = {"ranks": "ranks", "machines": "machines", "cores": "cores", "rounds": "rounds"}
    figures = KeyFigures([(words, str(report[key])) for key, words in names.items() if report.get(key)])
    skipped = [(item["algorithm"], item["reason"]) for item in report.get("skipped") or []]
    tables = [table, *([Table(("algorithm", "why it was not measured"), skipped)] if skipped else [])]
    return [
        Section("Result", "Every all-reduce algorithm, measured in alternating rounds.", [figures]),
        Section("Times", "Lower is faster; both axes are logarithmic.", parts),
        Section("All measurements", "", tables),
    ]


def _collective_trace(algorithm: str, members: Sequence[Row], number: int) -> dict[str, Any]:
    times = [row["time_s"] * 1e6 for row in members]
    trace = line(
        algorithm.replace("_", " "),
        [row["bytes"] for row in members],
        times,
        "%{customdata}: %{y:,.4g} µs",
        colour(number),
        customdata=[bytes_text(row["bytes"]) for row in members],
    )
    low, high = ([row["spread"][place] * 1e6 for row in members] for place in (0, 1))
    trace["error_y"] = {
        "type": "data",
        "symmetric": False,
        "array": [end - time for end, time in zip(high, times, strict=True)],
        "arrayminus": [time - begin for begin, time in zip(low, times, strict=True)],
        "color": colour(number),
        "thickness": 1,
        "width": 2,
    }
    symbols = ("circle", "diamond", "square", "triangle-up", "cross", "x", "star", "hexagon")
    trace["marker"] = {"size": 7, "color": colour(number), "symbol": symbols[number % len(symbols)]}
    trace["mode"] = "lines+markers"
    if algorithm == "auto":  # it lies on the line of the algorithm that it selects
        trace["line"] = {"width": 1.75, "color": colour(number), "dash": "dot"}
        trace["marker"] |= {"size": 12, "symbol": "circle-open"}
    return trace


def _predicted_chart(rows: Sequence[Row], ends: list[float]) -> Chart:
    exact = {"type": "scatter", "mode": "lines", "name": "predicted exactly", "x": ends, "y": ends, "hoverinfo": "skip"}
    points = {
        "type": "scatter",
        "mode": "markers",
        "name": "all-reduces",
        "x": [row["predicted_s"] * 1e6 for row in rows],
        "y": [row["time_s"] * 1e6 for row in rows],
        "customdata": [f"{row['algorithm']} of {bytes_text(row['bytes'])}" for row in rows],
        "hovertemplate": "%{customdata}<br>predicted %{x:,.4g} µs, measured %{y:,.4g} µs<extra></extra>",
        "marker": {"size": 8, "color": SERIES_COLOURS[0]},
    }
    ticks = log_axis(*ends)
    return Chart(
        "Predicted against measured time",
        figure(
            [exact | {"line": {"dash": "dash", "color": "var(--neutral)", "width": 1.5}}, points],
            axis("predicted", "µs", **ticks),
            axis("measured", "µs", **ticks),
            showlegend=True,
        ),
        400,
    )


def _peers(report: Mapping[str, Any]) -> list[Section]:
    rows: Sequence[Row] = report["rows"]
    names = [f"{row['name']}, {row['settings']}" for row in rows]
    ranked = [row.get("is_ranked", True) for row in rows]
    chart = ratio_chart(
        "Samples per second, relative to plain DDP at its defaults",
        names,
        [row["ratio"] for row in rows],
        [row["spread"] for row in rows],
        [str(row.get("how", "")) for row in rows],
    )
    header = ("library", "settings", "samples/s", "relative to DDP", "lowest", "highest", "final loss", "how")
    table = Table(
        header,
        [
            (
                row["name"],
                row["settings"],
                Cell(number_text(row["samples_per_s"]), row["samples_per_s"]),
                ratio_cell(row["ratio"]),
                *(ratio_cell(value) for value in row["spread"]),
                Cell(
                    _loss_text(row.get("final_loss"), is_ranked),
                    row.get("final_loss"),
                    "" if is_ranked else "bad",
                ),
                str(row.get("how", "")),
            )
            for row, is_ranked in zip(rows, ranked, strict=True)
        ],
        note="A loss that differs is too far from ours: that library did not train the same.",
    )
    left_out = [(name, reason) for name, reason in (report.get("left_out") or {}).items()]
    facts = [(key.replace("_", " "), str(report[key])) for key in ("ranks", "precision", "steps") if report.get(key)]
    versions = [(str(name), str(version)) for name, version in (report.get("versions") or {}).items()]
    tables = [table, *([Table(("library", "why it was left out"), left_out)] if left_out else [])]
    return [
        Section("Result", "All train the same model on the same batches.", [KeyFigures([*facts, *versions])]),
        Section("Speed", "Longer is faster. The thin line is the lowest and the highest round.", [chart]),
        Section("All libraries", "", tables),
    ]


def _loss_text(loss: float | None, is_ranked: bool) -> str:
    return f"{'not a number' if loss is None else f'{loss:.5g}'}{'' if is_ranked else ' (differs)'}"


_KINDS: tuple[tuple[str, tuple[str, ...], Callable[[Mapping[str, Any]], list[Section]]], ...] = (
    ("Collectives", ("algorithm", "time_s"), _collectives),
    ("Peers", ("name", "settings", "ratio"), _peers),
    ("Faults", ("spare", "rank", "during"), fault_sections),
)
