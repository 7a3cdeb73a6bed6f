"""The sections of the page of `bench faults`: how long a run took to go on after each kill."""

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.numbers.units import bytes_text, seconds_text
from meshwright.report.charts import axis, bars, colour, figure
from meshwright.report.page import Cell, Chart, KeyFigures, Section, Table

Row = Mapping[str, Any]


def fault_sections(report: Mapping[str, Any]) -> list[Section]:
    rows: Sequence[Row] = report["rows"]
    sections = [
        Section(name.capitalize(), _verdict(summary), [_figures(summary)])
        for name, summary in (report.get("summary") or {}).items()
    ]
    timed = [row for row in rows if row.get("seconds") is not None and row.get("parts")]
    if timed:
        text = "From each kill to the end of the next step. Kills after which ranks were killed again have no bar."
        sections.append(Section("Time to go on", text, [_chart(timed)]))
    return [*sections, Section("All kills", "", [_table(rows)])]


def _verdict(summary: Mapping[str, Any]) -> str:
    equal = "bitwise those" if summary.get("bitwise_equal") else "NOT those"
    left = "; ".join(map(str, summary.get("leftovers") or [])) or "nothing"
    return f"The final weights are {equal} of the undisturbed run. Left behind: {left}."


def _figures(summary: Mapping[str, Any]) -> KeyFigures:
    texts = {
        "kills": summary.get("kills"),
        "restarts": summary.get("restarts"),
        "committed steps lost": summary.get("lost_steps"),
        "time to go on, median": seconds_text(summary.get("recovery_s")),
        "memory of the spare process": bytes_text(summary.get("spare_memory_bytes")),
    }
    return KeyFigures([(name, str(text)) for name, text in texts.items() if text is not None])


def _chart(rows: Sequence[Row]) -> Chart:
    parts = list(dict.fromkeys(part for row in rows for part in row["parts"]))
    names = [f"{number + 1}{'' if row.get('spare') else ', no spare'}" for number, row in enumerate(rows)]
    traces = [
        bars(part, names, [row["parts"].get(part, 0) for row in rows], f"{part}: %{{y:.3g}} s", colour(number))
        for number, part in enumerate(parts)
    ]
    return Chart(
        "Time to go on after each kill, by what it was spent on",
        figure(traces, axis("kill", type="category"), axis("time", "s"), barmode="stack", showlegend=True),
        420,
    )


def _table(rows: Sequence[Row]) -> Table:
    header = ("spare", "rank", "at step", "during", "doing", "restarts before", "committed", "went on after", "time")
    return Table(
        header,
        [
            (
                "yes" if row.get("spare") else "no",
                row.get("rank"),
                row.get("step"),
                str(row.get("during")),
                str(row.get("activity")),
                row.get("attempt"),
                row.get("committed"),
                row.get("resumed"),
                None if row.get("seconds") is None else Cell(seconds_text(row["seconds"]), row["seconds"]),
            )
            for row in rows
        ],
    )
