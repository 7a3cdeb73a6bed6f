"""The page of a benchmark: of the JSON that `meshwright bench` prints or writes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.errors import InputError
from meshwright.numbers.units import bandwidth_text, bytes_text, number_text, seconds_text
from meshwright.report.benches.faults import fault_sections
from meshwright.report.benches.strategies import strategy_sections
from meshwright.report.charts import SERIES_COLOURS, axis, bars, colour, figure, line
from meshwright.report.hover import hover_text, log_axis
from meshwright.report.page import Cell, Chart, KeyFigures, Page, Section, Table

Row = Mapping[str, Any]
# The fields by which the rows of each benchmark are recognized.
_FIELDS = {
    "strategies": ("strategy",),
    "collectives": ("algorithm", "time_s"),
    "peers": ("name", "settings", "ratio"),
    "loading": ("what", "workers"),
    "faults": ("spare", "rank", "during"),
}


def is_bench(report: Mapping[str, Any]) -> bool:
    """Whether an object is the JSON of a benchmark."""
    return isinstance(report.get("rows"), list) and "summary" in report


def bench_page(report: Mapping[str, Any], name: str = "") -> Page:
    """Returns the page of a benchmark's JSON. Raises an `InputError` for rows that are not known."""
    kind = _kind(report)
    sections = _SECTIONS[kind](report)
    job = f" of {report['job']}" if report.get("job") else ""
    titles = {
        "strategies": "Strategies",
        "collectives": "Collectives",
        "peers": "Other libraries",
        "loading": "Loading",
        "faults": "Faults",
    }
    file = f", {name}" if name not in ("", kind) else ""
    return Page(f"{titles[kind]}{job}", f"meshwright bench {kind}{file}", sections)


def _kind(report: Mapping[str, Any]) -> str:
    rows = report["rows"]
    if report.get("kind") in _FIELDS:
        return str(report["kind"])
    for kind, fields in _FIELDS.items():
        if rows and all(isinstance(row, dict) and all(field in row for field in fields) for row in rows):
            return kind
    names = ", ".join(rows[0]) if rows and isinstance(rows[0], dict) else "none"
    raise InputError(
        f"the rows of this benchmark have the fields {names}: there are pages of bench {', '.join(_FIELDS)} only"
    )


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
                _ratio(row.get("ratio_to_native")),
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


def _ratio(value: float | None) -> Cell | None:
    return None if value is None else Cell(f"{value:.3g} ×", value)


def _peers(report: Mapping[str, Any]) -> list[Section]:
    rows: Sequence[Row] = report["rows"]
    names = [f"{row['name']}, {row['settings']}" for row in rows]
    ranked = [row.get("is_ranked", True) for row in rows]
    chart = _ratio_chart(
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
                _ratio(row["ratio"]),
                *(_ratio(value) for value in row["spread"]),
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


def _ratio_chart(
    title: str,
    names: Sequence[str],
    ratios: Sequence[float],
    spreads: Sequence[Sequence[float] | None],
    how: Sequence[str],
) -> Chart:
    trace = bars(
        "ratio",
        ratios,
        names,
        "%{y}: %{x:.3g} times<br>%{customdata}",
        SERIES_COLOURS[0],
        horizontal=True,
        customdata=[hover_text(words) for words in how],
    )
    ends = [spread or (ratio, ratio) for spread, ratio in zip(spreads, ratios, strict=True)]
    trace["error_x"] = {
        "type": "data",
        "symmetric": False,
        "array": [end[1] - ratio for end, ratio in zip(ends, ratios, strict=True)],
        "arrayminus": [ratio - end[0] for end, ratio in zip(ends, ratios, strict=True)],
        "color": "var(--ink)",
        "thickness": 1.2,
        "width": 3,
    }
    one = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 1, "x1": 1}
    return Chart(
        title,
        figure(
            [trace],
            axis("ratio", "times", rangemode="tozero"),
            axis("", type="category", autorange="reversed"),
            shapes=[one | {"line": {"color": "var(--bad)", "dash": "dash", "width": 1.5}}],
            showlegend=False,
        ),
        110 + 30 * len(names),
        "The dashed line is the reference.",
    )


def _loading(report: Mapping[str, Any]) -> list[Section]:
    rows: Sequence[Row] = report["rows"]
    compared = [row for row in rows if row.get("ratio")]
    parts: list[Any] = []
    if compared:
        names = [f"{row['what']}, {row['workers']} workers" for row in compared]
        how = [f"{number_text(row['samples_per_s'])} samples per second" for row in compared]
        ratios, spreads = [row["ratio"] for row in compared], [row.get("spread") for row in compared]
        parts.append(_ratio_chart("Loading speed, relative to the reference", names, ratios, spreads, how))
    table = Table(
        ("what", "workers", "samples/s", "reference samples/s", "ratio", "rounds"),
        [
            (
                row["what"],
                row["workers"],
                Cell(number_text(row["samples_per_s"]), row["samples_per_s"]),
                Cell(number_text(row["reference_per_s"]), row["reference_per_s"])
                if row.get("reference_per_s")
                else None,
                _ratio(row.get("ratio")),
                row.get("rounds"),
            )
            for row in rows
        ],
    )
    return [Section("Loading", "How fast samples are loaded, in alternating rounds with a reference.", [*parts, table])]


_SECTIONS: dict[str, Callable[[Mapping[str, Any]], list[Section]]] = {
    "strategies": strategy_sections,
    "collectives": _collectives,
    "peers": _peers,
    "loading": _loading,
    "faults": fault_sections,
}
