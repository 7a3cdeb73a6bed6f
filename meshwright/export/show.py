"""Prints an export as a table: size and metrics before and after, and their change."""

from rich.filesize import decimal

from meshwright.export.export import ExportResult
from meshwright.export.measure import MetricChange


def describe_export(exported: ExportResult) -> list[str]:
    """Returns the lines that `meshwright export` prints."""
    rows = [("", "before", "after", "change"), ("size", *_sizes(exported))]
    rows += [(name, *_values(name, change)) for name, change in exported.metrics.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    table = [
        f"{row[0]:<{widths[0]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    headline = f"{exported.run}, step {exported.step}, as {exported.format}: {exported.file}"
    return [headline, *table, *(f"note: {note}" for note in exported.notes)]


def _sizes(exported: ExportResult) -> tuple[str, str, str]:
    before, after = exported.bytes_before, exported.bytes
    return decimal(before, precision=2), decimal(after, precision=2), f"{after / before - 1:+.1%}" if before else ""


def _values(name: str, change: MetricChange) -> tuple[str, str, str]:
    if name == "accuracy":
        points = "" if change.change is None else f"{100 * change.change:+.2f} points"
        return _as_percentage(change.before), _as_percentage(change.after), points
    difference = "" if change.change is None else f"{change.change:+.6f}"
    return _as_number(change.before), _as_number(change.after), difference


def _as_percentage(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2%}"


def _as_number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6f}"
