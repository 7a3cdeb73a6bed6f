"""`python -m validation.runs`: per source the rows, the cases, the reasons, and the guess's errors."""

from collections import Counter

from rich.console import Console
from rich.table import Table

from validation.runs.baseline import Guess, errors, guess, points
from validation.runs.checks import Mismatch, flops_mismatches, parameter_mismatches
from validation.runs.cover import Coverage, cover
from validation.runs.families import families
from validation.runs.rows import rows

CONSOLE = Console(width=140)


def main() -> None:
    coverage = cover()
    _print_sources(coverage)
    _print_reasons(coverage)
    grouped = families(coverage.cases)
    CONSOLE.print(f"{len(grouped)} families, sizes {dict(sorted(Counter(map(len, grouped.values())).items()))}")
    CONSOLE.print(f"families by source {dict(Counter(members[0].source for members in grouped.values()))}")
    CONSOLE.print(f"out of memory: {', '.join(case.id for case in coverage.cases if case.oom)}")
    _print_mismatches(parameter_mismatches(coverage.cases, rows()))
    _print_mismatches(flops_mismatches(coverage.cases, rows()))


def _print_sources(coverage: Coverage) -> None:
    known = points(coverage.cases)
    hows: tuple[Guess, ...] = ("plain", "alike", "own")
    guesses = [guess(known, how) for how in hows]
    heads = [head for how in hows for head in (f"{how}: median", "p90")]
    table = Table("source", "rows", "cases", "timed", *heads)
    for source, count in Counter(row.source for row in rows()).items():
        cases = sum(case.source == source for case in coverage.cases)
        mine = [point for point in known if point.case.source == source]
        figures = [errors(mine, found) for found in guesses] if mine else []
        shown = [f"{value:.1%}" for figure in figures for value in (figure.median, figure.p90)]
        table.add_row(source, str(count), str(cases), str(len(mine)), *shown)
    CONSOLE.print(table)


def _print_reasons(coverage: Coverage) -> None:
    counted = Counter((row_id.rpartition("-")[0], reason) for row_id, reason in coverage.reasons.items())
    for (source, reason), count in sorted(counted.items(), key=lambda item: (item[0][0], -item[1])):
        CONSOLE.print(f"{source}: {count} × {reason}", highlight=False)


def _print_mismatches(found: list[Mismatch]) -> None:
    for mismatch in found:
        CONSOLE.print(
            f"{mismatch.id}: {mismatch.what}: {mismatch.ours:.4g} here, {mismatch.theirs:.4g} in the row "
            f"({mismatch.ratio:.2f})",
            highlight=False,
        )


if __name__ == "__main__":
    main()
