"""The charts and tables of `meshwright bench strategies`: speed with its spread, scaling, where the time goes, and
predictions beside measurements. What was not measured is shown as such."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from meshwright.numbers.units import bytes_text, number_text, seconds_text
from meshwright.report.charts import NEUTRAL, SERIES_COLOURS, axis, bars, colour, figure, line
from meshwright.report.hover import hover_text, log_axis
from meshwright.report.page import Cell, Chart, KeyFigures, Section, Table

_MOST_LINES = 9  # strategies whose scaling is drawn: the fastest
_SHARES = {
    "computing": SERIES_COLOURS[0],
    "communicating": SERIES_COLOURS[1],
    "waiting": SERIES_COLOURS[5],
    "bubble": NEUTRAL,
}
_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "x", "star", "hexagon")

Row = Mapping[str, Any]


def strategy_sections(report: Mapping[str, Any]) -> list[Section]:
    """Returns the sections of the page."""
    rows: list[Row] = report["rows"]
    speed = _speed_chart(rows)
    scaling = _scaling_chart(rows)
    shares = _shares_chart(rows)
    errors = _prediction_chart(rows)
    ranks = sorted({row["ranks"] for row in rows if row.get("ranks")})
    devices = _list([f"{number:,}" for number in ranks])
    what = "Samples per second" if any(row.get("samples_per_s") for row in rows) else "Predicted steps per second"
    sections = [
        Section("Result", _words(report, devices), [_key_figures(report)]),
        Section("Speed", f"{what} of each strategy, on the same global batch.", [speed] if speed else []),
        Section("Scaling", "The speed-up over one device.", [scaling] if scaling else []),
        Section("Where the time goes", "Shares of the time of all ranks.", [shares] if shares else []),
        Section(
            "Predicted and measured",
            "Points on the line are predicted exactly; points above it are slower than predicted.",
            [errors] if errors else [],
        ),
        Section(
            "All strategies", "Every row, with what was measured and predicted.", [_table(rows), *_skipped(report)]
        ),
    ]
    return [section for section in sections if section.parts]


def _name(row: Row, rows: Sequence[Row]) -> str:
    """The name of a row: its strategy, its number of devices, and its precision if there are several."""
    words = [row["strategy"].replace("_", " ")]
    if row.get("ranks"):
        words.append(f"on {row['ranks']:,}")
    if len({other.get("precision") for other in rows}) > 1:
        words.append(str(row.get("precision")))
    return " ".join(words)


def _step_s(row: Row) -> float | None:
    """The measured seconds of a step; the predicted ones if nothing was measured."""
    step_s: float | None = row.get("measured_step_s") or row.get("predicted_step_s")
    return step_s


def _words(report: Mapping[str, Any], devices: str) -> str:
    batch = f" with a global batch of {report['global_batch']:,} samples" if report.get("global_batch") else ""
    measured = any(row.get("measured_step_s") for row in report["rows"])
    how = "measured in alternating rounds" if measured else "predicted, as this machine does not have the devices"
    noun = "device" if devices == "1" else "devices"
    return f"The same job{batch} on {devices} {noun} with every strategy. Speeds are {how}."


def _list(words: Sequence[str]) -> str:
    """Words such as `1, 4 and 8`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def _key_figures(report: Mapping[str, Any]) -> KeyFigures:
    summary = report.get("summary") or {}
    rows: list[tuple[str, str]] = [(name, str(report[name])) for name in ("job", "cluster") if report.get(name)]
    if fastest := summary.get("fastest"):
        name = f"{fastest['strategy']} on {fastest['ranks']}, {fastest['precision']}".replace("_", " ")
        rows.append(("fastest", f"{name}: {seconds_text(fastest['step_s'])} a step"))
    rows += [(f"gain of {name} over fp32", f"{gain:.3g} ×") for name, gain in _items(summary, "mixed_precision_gain")]
    rows += [
        (f"auto over the best by hand, {ranks} devices", f"{gain:.3g} ×")
        for ranks, gain in _items(summary, "automatic_over_manual")
    ]
    if (error := summary.get("prediction_error_median")) is not None:
        rows.append(("median error of predictions", f"{error:.1%}"))
    if differing := summary.get("losses_differ"):
        rows.append(("losses that differ", ", ".join(differing)))
    if report.get("seconds"):
        rows.append(("took", seconds_text(report["seconds"])))
    return KeyFigures(rows)


def _items(summary: Mapping[str, Any], name: str) -> Iterator[tuple[str, float]]:
    values = summary.get(name) or {}
    return ((str(key), value) for key, value in values.items() if value is not None)


def _speed_chart(rows: Sequence[Row]) -> Chart | None:
    shown = [row for row in rows if row.get("samples_per_s")]
    predicted = not shown
    if predicted:
        shown = [row for row in rows if row.get("predicted_step_s")]
    if not shown:
        return None
    unit = "relative speed" if predicted else "samples per second"
    speeds = [1 / row["predicted_step_s"] if predicted else row["samples_per_s"] for row in shown]
    order = sorted(range(len(shown)), key=lambda number: speeds[number])
    traces = []
    for place, precision in enumerate(dict.fromkeys(row.get("precision") or "" for row in shown)):
        members = [number for number in order if (shown[number].get("precision") or "") == precision]
        trace = bars(
            precision or "speed",
            [speeds[number] for number in members],
            [_name(shown[number], [shown[number]]) for number in members],
            "%{y}: %{x:,.4g}<br>%{customdata}",
            colour(place),
            horizontal=True,
            customdata=[hover_text(str(shown[number].get("how", ""))) for number in members],
        )
        spreads = [speeds[number] * (shown[number].get("spread") or 0.0) / 2 for number in members]
        if any(spreads):
            trace["error_x"] = {"type": "data", "array": spreads, "color": "var(--ink)", "thickness": 1.2, "width": 3}
        traces.append(trace)
    names = list(dict.fromkeys(_name(shown[number], [shown[number]]) for number in order))
    title = "Predicted steps per second" if predicted else "Samples per second"
    return Chart(
        title,
        figure(
            traces,
            axis(unit if not predicted else "steps per second", rangemode="tozero"),
            axis("", type="category", categoryorder="array", categoryarray=names),
            barmode="group",
            showlegend=len(traces) > 1,
        ),
        110 + 24 * len(shown),
        "A strategy is named with its number of devices. The thin line is the spread of the rounds."
        if not predicted
        else "",
    )


def _scaling_chart(rows: Sequence[Row]) -> Chart | None:
    measured = any(row.get("speedup") for row in rows)
    field = "speedup" if measured else "predicted_speedup"
    points = [row for row in rows if row.get(field) and row.get("ranks")]
    ranks = sorted({row["ranks"] for row in points})
    if len(ranks) < 2:
        return None
    ideal = line("ideal", ranks, ranks, "%{y:.3g} times", NEUTRAL)
    ideal |= {"mode": "lines", "line": {"dash": "dash", "color": NEUTRAL, "width": 1.5}}
    traces = [ideal]
    fastest = sorted(points, key=lambda row: -row[field])
    keys = list(dict.fromkeys((row["strategy"], row.get("precision")) for row in fastest))
    for number, (strategy, precision) in enumerate(keys[:_MOST_LINES]):
        members = sorted(
            (row for row in points if (row["strategy"], row.get("precision")) == (strategy, precision)),
            key=lambda row: row["ranks"],
        )
        if members[0]["ranks"] > ranks[0] == 1:  # one device has a speed-up of 1 with every strategy
            members.insert(0, {"ranks": 1, field: 1.0})
        name = strategy.replace("_", " ")
        name = f"{name} {precision}" if precision and len({key[1] for key in keys}) > 1 else name
        trace = line(
            name, [row["ranks"] for row in members], [row[field] for row in members], "%{x} devices: %{y:.3g} times"
        )
        trace["marker"] = {"size": 8, "symbol": _SYMBOLS[number % len(_SYMBOLS)], "color": colour(number)}
        trace["line"] = {"width": 1.5, "color": colour(number), "dash": ("solid", "dot", "dashdot")[number // 8 % 3]}
        traces.append(trace)
    x = axis("devices", tickmode="array", tickvals=ranks, ticktext=[f"{number:,}" for number in ranks])
    kind = "Measured" if measured else "Predicted"
    return Chart(
        f"{kind} speed-up over one device",
        figure(traces, x, axis("speed-up", "times", rangemode="tozero"), showlegend=True),
        440,
        _speedup_note(rows)
        + (f" The {_MOST_LINES} fastest of {len(keys)} strategies are drawn." if len(keys) > _MOST_LINES else ""),
    )


def _speedup_note(rows: Sequence[Row]) -> str:
    note = "The dashed line is the ideal: as many times faster as there are devices of the same precision."
    alone = {row.get("precision") for row in rows if row["strategy"] == "single device"}
    others = sorted({str(row.get("precision")) for row in rows} - {str(precision) for precision in alone})
    if others and alone:
        note += f" One device was not run in {_list(others)}: those strategies are compared with it in fp32."
    return note


def _shares_chart(rows: Sequence[Row]) -> Chart | None:
    shown = [row for row in rows if row.get("shares")]
    if not shown:
        return None
    names = [_name(row, rows) for row in shown]
    kinds = dict.fromkeys([*_SHARES, *(kind for row in shown for kind in row["shares"])])
    traces = [
        bars(
            kind,
            [row["shares"].get(kind, 0.0) for row in shown],
            names,
            "%{y}: %{x:.1%}",
            _SHARES.get(kind, SERIES_COLOURS[6]),
            horizontal=True,
        )
        for kind in kinds
        if any(row["shares"].get(kind) for row in shown)
    ]
    missing = len(rows) - len(shown)
    return Chart(
        "Shares of the time of all ranks",
        figure(
            traces,
            axis("share of the time", tickformat=".0%", range=[0, 1]),
            axis("", type="category", autorange="reversed"),
            barmode="stack",
            showlegend=True,
        ),
        130 + 24 * len(shown),
        f"Of {missing:,} rows, shares were not measured." if missing else "",
    )


def _prediction_chart(rows: Sequence[Row]) -> Chart | None:
    shown = [row for row in rows if row.get("predicted_step_s") and row.get("measured_step_s")]
    if not shown:
        return None
    largest = max(max(row["predicted_step_s"], row["measured_step_s"]) for row in shown)
    unit_s, unit = (1.0, "s") if largest >= 2 else (1e-3, "ms")
    values = [row[field] / unit_s for row in shown for field in ("predicted_step_s", "measured_step_s")]
    limits = [min(values), max(values)]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "predicted exactly",
            "x": limits,
            "y": limits,
            "line": {"dash": "dash", "color": NEUTRAL, "width": 1.5},
            "hoverinfo": "skip",
        }
    ]
    for number, precision in enumerate(dict.fromkeys(row.get("precision") or "" for row in shown)):
        members = [row for row in shown if (row.get("precision") or "") == precision]
        spread = [(row.get("spread") or 0.0) * row["measured_step_s"] / unit_s / 2 for row in members]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": precision or "strategies",
                "x": [row["predicted_step_s"] / unit_s for row in members],
                "y": [row["measured_step_s"] / unit_s for row in members],
                "error_y": {"type": "data", "array": spread, "color": colour(number), "thickness": 1, "width": 2},
                "customdata": [
                    [_name(row, rows), row["predicted_step_s"] / row["measured_step_s"] - 1] for row in members
                ],
                "hovertemplate": f"<b>%{{customdata[0]}}</b><br>predicted %{{x:.4g}} {unit}, measured %{{y:.4g}} {unit}"
                "<br>error %{customdata[1]:+.1%}<extra></extra>",
                "marker": {"size": 9, "symbol": _SYMBOLS[number % len(_SYMBOLS)], "color": colour(number)},
            }
        )
    ticks = log_axis(*limits) if limits[1] > 5 * limits[0] else {}
    return Chart(
        "Predicted against measured time of a step",
        figure(traces, axis("predicted step", unit, **ticks), axis("measured step", unit, **ticks), showlegend=True),
        420,
    )


def _table(rows: Sequence[Row]) -> Table:
    header = (
        *(
            "strategy",
            "devices",
            "precision",
            "samples/s",
            "spread",
            "speed-up",
            "efficiency",
            "step",
            "predicted step",
        ),
        *("exchanged per step", "peak memory", "predicted memory", "loss", "how"),
    )
    return Table(
        header,
        [_table_row(row) for row in rows],
        note="A dash means that the value was not measured, or not predicted.",
    )


def _table_row(row: Row) -> tuple[Any, ...]:
    agrees = row.get("loss_agrees")
    loss = row.get("loss")
    loss_text = f"{loss:.5g}{'' if agrees is not False else ', differs'}" if loss is not None else ""
    return (
        row["strategy"],
        row.get("ranks"),
        row.get("precision") or "–",
        _cell(row.get("samples_per_s"), number_text),
        _cell(row.get("spread"), lambda value: f"{value:.1%}"),
        _cell(row.get("speedup"), lambda value: f"{value:.3g}"),
        _cell(row.get("efficiency"), lambda value: f"{value:.0%}"),
        _cell(row.get("measured_step_s"), seconds_text),
        _cell(row.get("predicted_step_s"), seconds_text),
        _cell(row.get("exchanged_bytes"), bytes_text),
        _cell(row.get("peak_memory_bytes"), bytes_text),
        _cell(row.get("predicted_memory_bytes"), bytes_text),
        None if loss is None else Cell(loss_text, loss, "bad" if agrees is False else ""),
        ". ".join(filter(None, (row.get("how"), row.get("note")))),
    )


def _cell(value: float | None, text: Callable[[float], str]) -> Cell | None:
    return None if value is None else Cell(text(value), value)


def _skipped(report: Mapping[str, Any]) -> list[Table]:
    skipped = report.get("skipped") or []
    rows = [
        (
            item.get("strategy") or item.get("algorithm") or "–",
            item.get("ranks"),
            item.get("precision") or "–",
            item["reason"],
        )
        for item in skipped
    ]
    return (
        [Table(("strategy", "devices", "precision", "why not"), rows, "Strategies that were not run")] if rows else []
    )
