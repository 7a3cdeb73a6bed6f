"""Text of Markdown: tables whose cells may have any characters."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; line breaks in cells become spaces, and bars are escaped."""
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def page(title: str, source: str, *parts: str) -> str:
    """A generated page, with a comment that says so."""
    note = f"<!-- Made by `python -m documentation` from {source}: change that, not this file. -->"
    return "\n\n".join([f"# {title}", note, *(part for part in parts if part)]) + "\n"
