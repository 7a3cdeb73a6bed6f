"""The tables of a sweep for docs/performance.md, and what they say in one sentence."""

from collections.abc import Iterable
from pathlib import Path
from statistics import median

from validation.speed.sweep.forms import BY_HAND, OURS
from validation.speed.sweep.results import Row, best_by_hand, ours, ratio, read_rows

RESULTS = Path(__file__).with_name("h200.json")
_NONE = "–"
_HEAD = (
    *("model", "batch", "eager", "compiled", "with graphs", "ours", "ours : by hand", "spread"),
    *("predicted", "GiB", "predicted", "commit"),
)


def sweep_part(file: Path = RESULTS) -> str:
    """The part of the page on speed that is made from the committed results."""
    rows = read_rows(file)
    return sweep_table(rows) if rows else "The sweep has not been run on a GPU at this state of the files yet."


def sweep_table(rows: list[Row]) -> str:
    """Sentences about all rows, a table of steps, a table of times to the first step, and what has failed."""
    parts = [_summary(rows), _table(_HEAD, [_cells(row) for row in rows])]
    cold = [row for row in rows if _first_steps(row)]
    if cold:
        head = ("model", "by hand, compiled, s", "ours, s", "ratio", "commit")
        parts.append("Seconds from the call to the end of the first step, with empty caches:")
        parts.append(_table(head, [_first_cells(row) for row in cold]))
    if remarks := [line for row in rows for line in _remarks(row)]:
        parts.append(f"Failures and warnings, at {_commits(rows)}:")
        parts.append("\n".join(remarks))
    return "\n\n".join(parts)


def describe_row(row: Row) -> str:
    """A line for a model that was just measured."""
    cells = dict(zip(("", "", *BY_HAND, OURS, "ratio", "spread"), _cells(row), strict=False))
    figures = ", ".join(f"{name} {text}" for name, text in cells.items() if name)
    return "\n  ".join([f"{row['model']}: {figures} ms; {row.get('duration_s', 0):.0f} s", *_remarks(row)])


def _summary(rows: list[Row]) -> str:
    machines = sorted({f"{row['device']} with torch {row['torch']}" for row in rows})
    digests = sorted({row["digest"] for row in rows})
    place = f"{len(rows)} models on {'; '.join(machines)}, at {_commits(rows)}"
    lines = [f"{place}. Digest of the step's files: {', '.join(digests)}."]
    if ratios := [value for row in rows if (value := ratio(row)) is not None]:
        lines.append(
            f"Ours : best by hand is {median(ratios):.3f} in the median of {len(ratios)}, {max(ratios):.2f} at most."
        )
    if errors := [abs(value) for row in rows if (value := _time_error(row)) is not None]:
        lines.append(f"Predicted times are {median(errors):.1%} off in the median, {max(errors):.0%} at most.")
    if errors := [abs(value) for row in rows if (value := _memory_error(row)) is not None]:
        lines.append(f"Predicted memory is {median(errors):.1%} off in the median, {max(errors):.0%} at most.")
    return " ".join(lines)


def _commits(rows: list[Row]) -> str:
    return ", ".join(f"`{commit}`" for commit in dict.fromkeys(row["commit"] or "unknown" for row in rows))


def _cells(row: Row) -> list[str]:
    forms = row.get("forms", {})
    times = [_ms(forms.get(form, {})) for form in (*BY_HAND, OURS)]
    hand, own, quotient = best_by_hand(row), ours(row), ratio(row)
    spreads = [figures.get("spread") for figures in (hand[1] if hand else {}, own or {})]
    known = [spread for spread in spreads if spread is not None]
    peak = (own or {}).get("peak_bytes")
    return [
        row["model"],
        _batch(row),
        *times,
        _NONE if quotient is None else f"{quotient:.2f}",
        f"{max(known):.1%}" if known else _NONE,
        _error(_time_error(row)),
        _NONE if peak is None else f"{peak / 2**30:.1f}",
        _error(_memory_error(row)),
        f"`{row['commit']}`" if row["commit"] else "unknown",
    ]


def _batch(row: Row) -> str:
    sizes = row["sizes"]
    parts = [str(sizes["samples"])]
    if "length" in sizes:
        parts.append(f"{sizes['length']:,}")
    if "image" in sizes:
        parts.append(f"{sizes['image']}²")
    return " × ".join(parts)


def _first_steps(row: Row) -> tuple[float, float] | None:
    """The seconds to the first step by hand (compiled) and of ours, if they were measured with empty caches."""
    hand, own = (row.get("forms", {}).get(form, {}).get("first_step_s") for form in ("compiled", OURS))
    return (hand, own) if row.get("cold") and hand and own else None


def _first_cells(row: Row) -> list[str]:
    hand, own = _first_steps(row) or (0.0, 0.0)
    return [row["model"], f"{hand:.1f}", f"{own:.1f}", f"{own / hand:.2f}", f"`{row['commit']}`"]


def _time_error(row: Row) -> float | None:
    own, predicted = ours(row), row.get("predicted", {})
    return predicted["step_s"] / own["step_s"] - 1 if own and "step_s" in predicted else None


def _memory_error(row: Row) -> float | None:
    own, predicted = ours(row), row.get("predicted", {})
    known = own and "peak_bytes" in own and "memory_bytes" in predicted
    return predicted["memory_bytes"] / own["peak_bytes"] - 1 if own and known else None


def _remarks(row: Row) -> list[str]:
    """What has failed in a row, and our warnings."""
    lines = [f"- {row['model']}: {row['failure']}"] if "failure" in row else []
    for form, figures in row.get("forms", {}).items():
        lines += [
            f"- {row['model']}, {form}: {figures[key]}" for key in ("failure", "failure_in_turns") if key in figures
        ]
        lines += [f"- {row['model']}, {form}, warning: {text}" for text in figures.get("warnings", ())]
    if "failure" in row.get("predicted", {}):
        lines.append(f"- {row['model']}, prediction: {row['predicted']['failure']}")
    return lines


def _ms(figures: Row) -> str:
    return f"{figures['step_s'] * 1e3:.2f}" if "step_s" in figures else ("failed" if figures else _NONE)


def _error(value: float | None) -> str:
    return _NONE if value is None else f"{value:+.0%}"


def _table(head: Iterable[str], rows: Iterable[list[str]]) -> str:
    lines = [list(head), ["---" for _ in head], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
