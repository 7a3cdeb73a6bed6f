"""Every published row: a case, or the reason why it is none."""

from collections.abc import Iterable
from dataclasses import dataclass

from validation.runs.case import Case, NotCovered
from validation.runs.reading.decoders import is_decoder, read_decoder
from validation.runs.reading.examples import is_example, read_example
from validation.runs.rows import Row, rows


@dataclass(frozen=True)
class Coverage:
    """`reasons` by the row's id."""

    cases: tuple[Case, ...]
    reasons: dict[str, str]


def cover(found: Iterable[Row] | None = None) -> Coverage:
    """Of the carried rows, or of others."""
    cases: list[Case] = []
    reasons: dict[str, str] = {}
    for row in rows() if found is None else found:
        try:
            cases.append(case_of(row))
        except NotCovered as reason:
            reasons[row.id] = str(reason)
    return Coverage(tuple(cases), reasons)


def case_of(row: Row) -> Case:
    if is_decoder(row):
        return read_decoder(row)
    if is_example(row):
        return read_example(row)
    raise NotCovered("nothing is known of this source")
