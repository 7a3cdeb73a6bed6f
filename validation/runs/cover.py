"""Turns every published row into a case, or gives the reason why it cannot."""

from collections.abc import Iterable
from dataclasses import dataclass

from validation.runs.case import NotCovered, PublishedCase
from validation.runs.reading.decoders import is_decoder, read_decoder
from validation.runs.reading.examples import is_example, read_example
from validation.runs.rows import PublishedRow, rows


@dataclass(frozen=True)
class Coverage:
    """The cases, and for every row that is not covered the reason, by the id of the row."""

    cases: tuple[PublishedCase, ...]
    reasons: dict[str, str]


def cover(published_rows: Iterable[PublishedRow] | None = None) -> Coverage:
    """The coverage of the given rows; of all rows in rows.jsonl when none are given."""
    cases: list[PublishedCase] = []
    reasons: dict[str, str] = {}
    for row in rows() if published_rows is None else published_rows:
        try:
            cases.append(case_of(row))
        except NotCovered as reason:
            reasons[row.id] = str(reason)
    return Coverage(tuple(cases), reasons)


def case_of(row: PublishedRow) -> PublishedCase:
    """The case that a row describes. Raises `NotCovered` with the reason when there is none."""
    if is_decoder(row):
        return read_decoder(row)
    if is_example(row):
        return read_example(row)
    raise NotCovered("no reader knows the rows of this source")
