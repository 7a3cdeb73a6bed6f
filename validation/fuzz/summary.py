"""Counts outcomes by plan, axis and operator."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

OUTCOMES = ("equal", "refused", "wrong", "crash")


def summary_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Tables of outcomes by plan, axis and operator, and what refusals leave out."""
    by_plan = [(row["plan"], row["outcome"]) for row in rows]
    by_axis = [(axis, row["outcome"]) for row in rows for axis in row["axes"]]
    by_operator = [(name, row["outcome"]) for row in rows for name in row["operators"]]
    no_line = sum(row["outcome"] == "refused" and not row["names_line"] for row in rows)
    total = Counter(row["outcome"] for row in rows)
    return [
        *_table("plan", by_plan),
        "",
        *_table("axis", by_axis),
        "",
        *_table("operator", by_operator),
        "",
        f"{len(rows)} programs: " + ", ".join(f"{total[name]} {name}" for name in OUTCOMES),
        f"{no_line} refusals do not name a line of the program",
    ]


def _table(title: str, pairs: Iterable[tuple[str, str]]) -> list[str]:
    counts: dict[str, Counter[str]] = {}
    for name, outcome in pairs:
        counts.setdefault(name, Counter())[outcome] += 1
    width = max([len(title), *map(len, counts)])
    lines = [f"{title:{width}}  programs  " + "  ".join(f"{name:>7}" for name in OUTCOMES)]
    for name in sorted(counts):
        numbers = "  ".join(f"{counts[name][outcome]:7}" for outcome in OUTCOMES)
        lines.append(f"{name:{width}}  {counts[name].total():8}  {numbers}")
    return lines
