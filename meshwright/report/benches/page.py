"""The page of a benchmark: of the JSON that `meshwright bench` prints or writes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.errors import InputError
from meshwright.numbers.units import number_text
from meshwright.report.benches.strategies import strategy_sections
from meshwright.report.charts import SERIES_COLOURS, axis, bars, figure
from meshwright.report.hover import hover_text
from meshwright.report.page import Cell, Chart, Page, Section, Table

Row = Mapping[str, Any]
# The fields by which the rows of each benchmark are recognized.
_FIELDS = {
    "strategies": ("strategy",),
    "loading": ("what", "workers"),
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
        "loading": "Loading",
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


def ratio_cell(value: float | None) -> Cell | None:
    return None if value is None else Cell(f"{value:.3g} ×", value)


def ratio_chart(
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
        parts.append(ratio_chart("Loading speed, relative to the reference", names, ratios, spreads, how))
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
                ratio_cell(row.get("ratio")),
                row.get("rounds"),
            )
            for row in rows
        ],
    )
    return [Section("Loading", "How fast samples are loaded, in alternating rounds with a reference.", [*parts, table])]


_SECTIONS: dict[str, Callable[[Mapping[str, Any]], list[Section]]] = {
    "strategies": strategy_sections,
    "loading": _loading,
}
