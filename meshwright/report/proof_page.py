"""The page of a proof: every tensor that was compared, with its error and its tolerance. Where two trainings differ, it
has the first difference with the evidence for its cause."""

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.report.charts import BAD, MUTED, SERIES_COLOURS, axis, figure
from meshwright.report.page import Cell, Chart, KeyFigures, Page, Part, Section, Table

MOST_ROWS = 20_000
_MOST_POINTS = 3_000
_KINDS = {
    "initial weight": ("initial weights", "square", SERIES_COLOURS[6]),
    "loss": ("losses", "star", SERIES_COLOURS[5]),
    "gradient": ("gradients", "circle", SERIES_COLOURS[0]),
    "gradient norm": ("gradient norms", "diamond", SERIES_COLOURS[1]),
    "buffer": ("buffers", "cross", SERIES_COLOURS[3]),
    "weight": ("weights", "triangle-up", SERIES_COLOURS[2]),
}

Row = dict[str, Any]


def proof_page(details: Mapping[str, Any], name: str = "") -> Page:
    """Returns the page of a proof. `details` is the JSON that `meshwright prove` saves; without `compared`, as in the
    JSON that it prints, the page has the summary only."""
    rows = _rows(details)
    title = f"Proof of {name}" if name else "Proof"
    reference = f"the run {details['against']}" if details.get("against") else "one device"
    verdict = f"trains as {reference} does" if details["equal"] else f"does not train as {reference} does"
    sections = [
        Section("Result", _result_words(details, reference), [_key_figures(details), *_notes(details)]),
        Section("The first difference", _difference_words(details), list(_cause_tables(details))),
        Section("Errors and tolerances", _chart_words(details), [_error_chart(rows)] if rows else []),
        Section("Every comparison", _table_words(details), [_table(rows)] if rows else []),
    ]
    badge = "equal" if details["equal"] else "not equal"
    return Page(title, f"{details['summary']} {verdict}", [section for section in sections if section.parts], badge)


def _rows(details: Mapping[str, Any]) -> list[Row]:
    compared = details.get("compared") or {"columns": [], "rows": []}
    return [dict(zip(compared["columns"], row, strict=True)) for row in compared["rows"]]


def _is_equal(row: Row) -> bool:
    return row["error"] is not None and row["error"] <= row["tolerance"]


def _result_words(details: Mapping[str, Any], reference: str) -> str:
    steps, dtype = details["steps"], details["dtype"]
    words = f"{steps} training steps under the plan were compared with {reference}, in {dtype}."
    if details["equal"]:
        return f"{words} No value differs by more than rounding explains."
    return f"{words} They differ by more than rounding explains."


def _key_figures(details: Mapping[str, Any]) -> KeyFigures:
    rows = [
        ("largest relative error", _number(details["max_relative_error"])),
        ("tolerance", _number(details["tolerance"])),
        (
            "ranks",
            f"{details['ranks']:,} on {'GPUs' if details['device'] == 'cuda' else details['device'].upper() + 's'}",
        ),
        ("steps", f"{details['steps']:,}"),
    ]
    return KeyFigures([*rows, *((f"{name} compared", f"{count:,}") for name, count in details["checked"].items())])


def _notes(details: Mapping[str, Any]) -> Iterator[Part]:
    rows = [("tolerance", details["tolerance_is"])]
    if details.get("shrunk"):
        rows.append(("shrunk", details["shrunk"]))
    rows += [("note", note) for note in details["notes"]]
    yield Table(("", "about this proof"), rows)


def _difference_words(details: Mapping[str, Any]) -> str:
    first = details["first_difference"]
    if not first:
        return ""
    of = f" of {first['parameter']}" if first["parameter"] and first["what"] != "loss" else ""
    when = f"in step {first['step']}" if first["step"] else "before the first step"
    rank = f" on rank {first['rank']}" if first.get("rank") else ""
    also = f" The first gradient that differs is that of {first['parameter']}." if first["what"] == "loss" else ""
    also = also if first["parameter"] else ""
    cause = (first["cause"] or "unknown").replace("_", " ")
    why = f" {first['explanation'][0].upper()}{first['explanation'][1:]}." if first.get("explanation") else ""
    size = f"{_number(first['error'])} off, {_times(first, details)} the tolerance"
    return f"The {first['what']}{of}{rank} {when} is {size}.{also} Cause: {cause}.{why}"


def _times(first: Mapping[str, Any], details: Mapping[str, Any]) -> str:
    if first["error"] is None or not details["tolerance"]:
        return "infinitely many times"
    times = first["error"] / details["tolerance"]
    return "more than a million times" if times > 1e6 else f"{times:,.3g} times"


def _cause_tables(details: Mapping[str, Any]) -> Iterator[Part]:
    first = details["first_difference"]
    if not first:
        return
    rows: list[tuple[str, Cell, str, str]] = []
    fitting = first.get("fitting") or []
    for item in fitting:
        is_named = item["cause"] == first["cause"]
        verdict = Cell("the cause", tone="bad") if is_named else Cell("fits no better")
        rows.append((item["cause"].replace("_", " "), verdict, _number(item["residual"]), item["explanation"]))
    if not fitting:
        words = first.get("explanation") or ""
        rows.append(((first["cause"] or "unknown").replace("_", " "), Cell("the cause", tone="bad"), "–", words))
    rows += [(cause.replace("_", " "), Cell("ruled out", tone="muted"), "–", "") for cause in first["ruled_out"]]
    note = (
        "Each cause was tested by an experiment on the step that differs: the residual is the error that remains if the"
        " cause is taken into account."
    )
    yield Table(("cause", "verdict", "residual", "evidence"), rows, "What could cause it", note)


def _chart_words(details: Mapping[str, Any]) -> str:
    return (
        "An error is the largest difference in a tensor, divided by the largest value in its layer. Points below the"
        " dashed line are within the tolerance. Values that are equal to the last bit are at the bottom."
    )


def _error_chart(rows: list[Row]) -> Chart:
    finite = [row["error"] for row in rows if row["error"]]
    tolerances = [row["tolerance"] for row in rows if row["tolerance"]]
    floor = min([*finite, *tolerances, 1e-16]) / 10
    ceiling = max([*finite, *tolerances, floor * 10]) * 10
    numbered = list(enumerate(rows))
    traces = []
    for kind, (words, symbol, colour) in _KINDS.items():
        members = _largest([item for item in numbered if item[1]["what"] == kind])
        if members:
            traces.append(_error_trace(words, members, symbol, colour, floor, ceiling))
    places = _step_starts(rows)
    tolerance = [row["tolerance"] for row in rows]
    steps = [0, *(place for place, _ in places[1:]), len(rows) - 1]
    traces.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "tolerance",
            "x": steps,
            "y": [tolerance[place] or floor for place in steps],
            "line": {"color": BAD, "dash": "dash", "width": 1.5, "shape": "hv"},
            "hovertemplate": "tolerance %{y:.2e}<extra></extra>",
        }
    )
    lines = [
        {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": place - 0.5, "x1": place - 0.5}
        | {"line": {"color": MUTED, "width": 0.5}}
        for place, _ in places[1:]
    ]
    x = axis("compared values, in the order of training", tickmode="array", tickvals=[place for place, _ in places])
    x["ticktext"] = [words for _, words in places]
    y = axis("relative error", type="log", exponentformat="power", tickformat=".0e", nticks=8)
    return Chart("The error of every compared value", figure(traces, x, y, shapes=lines, showlegend=True), 420)


def _error_trace(
    words: str, members: list[tuple[int, Row]], symbol: str, colour: str, floor: float, ceiling: float
) -> dict[str, Any]:
    errors = [ceiling if row["error"] is None else row["error"] or floor for _, row in members]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{words} ({len(members):,})",
        "x": [number for number, _ in members],
        "y": errors,
        "customdata": [
            [
                row["parameter"] or row["what"],
                row["step"],
                _number(row["error"]),
                _number(row["tolerance"]),
                row["rank"],
            ]
            for _, row in members
        ],
        "hovertemplate": "<b>%{customdata[0]}</b><br>step %{customdata[1]}, rank %{customdata[4]}<br>error"
        " %{customdata[2]}, tolerance %{customdata[3]}<extra></extra>",
        "marker": {"symbol": symbol, "size": 7, "color": colour, "opacity": 0.85},
    }


def _largest(items: list[tuple[int, Row]]) -> list[tuple[int, Row]]:
    """At most `_MOST_POINTS` items in their order: the one with the largest error of every range of equal length."""
    length = max(1, -(-len(items) // _MOST_POINTS))
    ranges = (items[begin : begin + length] for begin in range(0, len(items), length))
    return [max(part, key=lambda item: _sort_error(item[1])) for part in ranges]


def _sort_error(row: Row) -> float:
    return float("inf") if row["error"] is None else row["error"]


def _step_starts(rows: list[Row]) -> list[tuple[int, str]]:
    """The number of the first value of each step, with the name of the step."""
    starts: dict[int, int] = {}
    for number, row in enumerate(rows):
        starts.setdefault(row["step"], number)
    return [(number, f"step {step}" if step else "start") for step, number in starts.items()]


def _table_words(details: Mapping[str, Any]) -> str:
    count = len((details.get("compared") or {"rows": []})["rows"])
    words = (
        f"{count:,} values were compared. Click on a column to sort by it; filter by the name of a module or a step."
    )
    if count > MOST_ROWS:
        words += f" The table has the {MOST_ROWS:,} with the largest errors; the JSON file has all."
    return words


def _table(rows: list[Row]) -> Table:
    shown = rows
    if len(rows) > MOST_ROWS:
        keep = sorted(range(len(rows)), key=lambda number: -_sort_error(rows[number]))[:MOST_ROWS]
        shown = [rows[number] for number in sorted(keep)]
    shown = [row for row in shown if not _is_equal(row)] + [row for row in shown if _is_equal(row)]
    header = ("step", "value", "tensor", "rank", "error", "tolerance", "error / tolerance", "verdict")
    return Table(header, [_table_row(row) for row in shown])


def _table_row(row: Row) -> tuple[Any, ...]:
    share = row["error"] / row["tolerance"] if row["error"] is not None and row["tolerance"] else None
    is_equal, tone = _is_equal(row), "" if _is_equal(row) else "bad"
    return (
        row["step"],
        row["what"],
        row["parameter"] or "–",
        row["rank"],
        Cell(_number(row["error"]), _sort_value(row["error"]), tone),
        Cell(_number(row["tolerance"]), row["tolerance"]),
        Cell("0" if row["error"] == 0 else f"{share:.2g}" if share is not None else "–", _sort_value(share), tone),
        Cell("equal" if is_equal else "differs", tone="good" if is_equal else "bad"),
    )


def _sort_value(value: float | None) -> float:
    return 1e300 if value is None else value


def _number(value: float | None) -> str:
    """A number in scientific notation; `infinite` for None, which stands for it in JSON."""
    return "infinite" if value is None else "0" if value == 0 else f"{value:.2e}"
