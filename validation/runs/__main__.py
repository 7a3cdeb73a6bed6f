"""`python -m validation.runs` prints for each source its rows, its cases, the reasons for rows that are not covered,
and the errors of the guess (baseline.py)."""

from collections import Counter

from rich.console import Console
from rich.table import Table

from validation.runs.baseline import GuessMethod, guess_errors, guess_step_s, timed_cases
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
    timed = timed_cases(coverage.cases)
    methods: tuple[GuessMethod, ...] = ("same_gpu", "similar_models", "same_source")
    guesses = [guess_step_s(timed, method) for method in methods]
    headings = [heading for method in methods for heading in (f"{method}: median", "p90")]
    table = Table("source", "rows", "cases", "timed", *headings)
    for source, count in Counter(row.source for row in rows()).items():
        cases = sum(case.source == source for case in coverage.cases)
        of_source = [case for case in timed if case.case.source == source]
        errors = [guess_errors(of_source, guessed_s) for guessed_s in guesses] if of_source else []
        cells = [f"{value:.1%}" for error in errors for value in (error.median, error.p90)]
        table.add_row(source, str(count), str(cases), str(len(of_source)), *cells)
    CONSOLE.print(table)


def _print_reasons(coverage: Coverage) -> None:
    counts = Counter((row_id.rpartition("-")[0], reason) for row_id, reason in coverage.reasons.items())
    for (source, reason), count in sorted(counts.items(), key=lambda item: (item[0][0], -item[1])):
        CONSOLE.print(f"{source}: {count} × {reason}", highlight=False)


def _print_mismatches(mismatches: list[Mismatch]) -> None:
    for mismatch in mismatches:
        CONSOLE.print(
            f"{mismatch.id}: {mismatch.quantity}: {mismatch.ours:.4g} here, {mismatch.theirs:.4g} in the row "
            f"({mismatch.ratio:.2f})",
            highlight=False,
        )


if __name__ == "__main__":
    main()
