"""The report of `report.py` as text: a table for the terminal, and the Markdown file that `make validate` writes.

Both are made from the JSON form of a report (`as_json`). The Markdown contains no times, dates or paths of a machine:
two runs of the same code write the same file.
"""

from collections.abc import Iterable
from pathlib import Path
from textwrap import fill
from typing import Any

from validation.predictions.report import (
    FALSE_ALARMS_BAR,
    HARD_GUESS,
    MEDIAN_BAR,
    P90_BAR,
    ROWS_PER_SLOW_SOURCE,
    ROWS_PER_SOURCE,
    SKILL_BAR,
    TAU_BAR,
    WIDEST_SPREAD,
)
from validation.runs.rows import origins, rows

_FOLDER = Path(__file__).parents[1]
SHORT_RUN_FILE = _FOLDER / "report.md"
EVERY_ROW_FILE = _FOLDER / "report_all.md"
_BAR_NAMES = {"alarms": "false alarms", "calls": "called"}  # as the columns are called

_INTRODUCTION = """
Every row is a training run that others published with its model, its hardware, its parallelization and its measured
step time. The row is described as a model, a cluster and a plan, and Meshwright predicts the step time from these,
without a GPU. `validation/runs/rows.jsonl` has the rows, and `validation/runs/origins.jsonl` the file and the commit
that each was read from.

**No source helps to predict itself.** One number is fitted to published rows, the launch factor: how many times longer
a host needs to launch an operator than the host of the reference GPU. For each source it is fitted to other sources,
which have neither authors nor machines in common with it (`validation/runs/related_sources.yaml`). Rates that a source
published of its own machines are removed from the catalog before its rows are predicted. Which behaviours of a program
to model was learned from some of these rows: `validation/history.md` says from which.
"""
_FIGURES = (
    (
        "median, p90",
        "error of the predicted step time, abs(predicted - measured) / measured: half of the rows and nine of ten rows "
        "stay below it",
        f"{MEDIAN_BAR:.0%} and {P90_BAR:.0%}",
    ),
    ("unfitted", "median error with a launch factor of 1", ""),
    (
        "guess",
        "median error of the assumption that GPUs of one kind always reach the same share of their peak rate, as they "
        "did with similar models in the runs of unrelated sources",
        "",
    ),
    ("skill", "guess divided by median", f"{SKILL_BAR:.0f}, if the guess is more than {HARD_GUESS:.0%} off"),
    (
        "tau",
        "Kendall's tau over pairs of plans for the same model, hardware and batch: 1 if all pairs are predicted in the "
        "right order, 0 if half of them are",
        f"{TAU_BAR}",
    ),
    (
        "false alarms",
        "runs that succeeded, but were predicted to run out of memory",
        f"at most {FALSE_ALARMS_BAR:.0%} of the runs that succeeded",
    ),
    ("called", "runs that ran out of memory and were predicted to do so", "all runs that ran out of memory"),
)
_SOURCE_COLUMNS = (
    *("source", "read from", "rows", "median", "p90", "unfitted", "guess", "skill", "launch factor"),
    *("tau (pairs)", "false alarms", "called", "bars missed"),
)
_NOT_JUDGED = f"""
A source is not judged if it measured one case repeatedly with step times that differ by more than a factor of
{WIDEST_SPREAD:.2f}: no prediction is within {P90_BAR:.0%} of both.
"""


def table_lines(report: dict[str, Any]) -> list[str]:
    """A short table with one line for each source, and the totals."""
    head = f"{'source':22}{'rows':>5}{'median':>9}{'p90':>8}{'unfitted':>10}{'guess':>9}{'skill':>7}{'tau':>7}"
    lines = [f"{head}  bars missed"]
    for source, score in _sources(report):
        figures = f"{score['fitted']['median']:9.1%}{score['fitted']['p90']:8.1%}{score['plain']['median']:10.1%}"
        tau = f"{score['order']['tau']:.2f}" if score["order"] else ""
        guess = f"{score['guessed']['median']:9.1%}{score['skill']:7.1f}"
        lines.append(f"{source:22}{score['rows']:5}{figures}{guess}{tau:>7}  {_verdict(score)}")
    return [*lines, "", *(f"{name}: {value}" for name, value in _totals(report))]


def markdown(report: dict[str, Any], every_row: bool) -> str:
    """The whole report as a Markdown document."""
    command = "make validate ALL=1" if every_row else "make validate"
    extent = (
        "It covers every published row that can be predicted."
        if every_row
        else f"It covers a short run: at most {ROWS_PER_SOURCE} rows of each source, evenly spaced, and at most "
        f"{ROWS_PER_SLOW_SOURCE} of sources whose rows have many different models. `make validate ALL=1` predicts "
        "every row and writes `validation/report_all.md`."
    )
    sections = [
        "# Predicted step times compared with published training runs",
        fill(f"This file is written by `{command}` (`python -m validation`). {extent}", width=120),
        _INTRODUCTION.strip(),
        "## How rows are judged",
        _table(("figure", "meaning", "bar"), _FIGURES),
        _NOT_JUDGED.strip(),
        "## Overall",
        _table(("figure", "value"), _totals(report)),
        "## By source",
        _table(
            _SOURCE_COLUMNS,
            (_source_cells(report, source, score) for source, score in _sources(report)),
        ),
        "## Rows that were not predicted",
        _table(("rows", "source", "reason"), _reason_cells(report["not_covered"])),
    ]
    return "\n\n".join(sections) + "\n"


def launch_factors(report: dict[str, Any]) -> dict[str, float]:
    """The launch factor of each source that has predicted rows."""
    return {row["id"].rpartition("-")[0]: row["factors"]["launch"] for row in report["rows"]}


def _sources(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(source, score) for source, score in report["summary"].items() if source != "all"]


def _totals(report: dict[str, Any]) -> list[tuple[str, str]]:
    totals = report["summary"]["all"]
    guesses = sorted(score["guessed"]["median"] for _, score in _sources(report) if score["judged"])
    return [
        ("judged rows", f"{totals['rows']:,} of {totals['sources']} sources"),
        ("median error", f"{totals['median']:.1%}"),
        ("p90, the error that nine of ten rows stay below", f"{totals['p90']:.1%}"),
        ("median error of the middle source", f"{totals['median_of_sources']:.1%}"),
        ("order of plans", f"tau {totals['tau']:.2f}: {(1 + totals['tau']) / 2:.0%} of the pairs in the right order"),
        (
            "median error of the guess, by source",
            f"{guesses[0]:.0%} to {guesses[-1]:.0%}, {guesses[len(guesses) // 2]:.0%} in the middle source",
        ),
        (
            f"sources whose guess is more than {HARD_GUESS:.0%} off: with a skill of at least {SKILL_BAR:.0f}",
            f"{totals['skilled']} of {totals['hard']}",
        ),
        ("sources that meet every bar", f"{totals['passing']} of {totals['sources']}"),
        (
            "rows of all sources, also those not judged",
            f"{totals['every_rows']:,}: median {totals['every_median']:.1%}, p90 {totals['every_p90']:.1%}, "
            f"tau {totals['every_tau']:.2f}",
        ),
        ("runs that succeeded, but were predicted to run out of memory", f"{totals['false_alarms']:.1%}"),
        ("runs that ran out of memory and were predicted to do so", f"{totals['called']:.0%}"),
        ("rows that were not predicted", f"{sum(report['not_covered'].values()):,}"),
    ]


def _source_cells(report: dict[str, Any], source: str, score: dict[str, Any]) -> tuple[str, ...]:
    memory, order = score["alarms"], score["order"]
    return (
        source,
        _publication(source),
        str(score["rows"]),
        f"{score['fitted']['median']:.1%}",
        f"{score['fitted']['p90']:.1%}",
        f"{score['plain']['median']:.1%}",
        f"{score['guessed']['median']:.1%}",
        f"{score['skill']:.1f}",
        f"{launch_factors(report)[source]:.2f}",
        f"{order['tau']:.2f} ({order['pairs']})" if order else "",
        f"{memory['false_alarms']} of {memory['ran']}" if memory["ran"] else "",
        f"{memory['called']} of {memory['failed']}" if memory["failed"] else "",
        _verdict(score),
    )


def _verdict(score: dict[str, Any]) -> str:
    """The bars that a source misses, or why it is not judged; an empty string if it meets every bar."""
    if not score["judged"]:
        return f"not judged: two measurements of one case differ by a factor of {score['apart']:.1f}"
    return ", ".join(_BAR_NAMES.get(bar, bar) for bar in score["missed"])


def _publication(source: str) -> str:
    """The repositories that the rows of a source were read from."""
    repositories = {origins()[row.origin]["repo"]: None for row in rows() if row.source == source}
    return ", ".join(repositories)


def _reason_cells(not_covered: dict[str, int]) -> list[tuple[str, str, str]]:
    ordered = sorted(not_covered.items(), key=lambda item: (-item[1], item[0]))
    return [(str(count), *_split_once(text)) for text, count in ordered]


def _split_once(text: str) -> tuple[str, str]:
    source, _, reason = text.partition(": ")
    return source, reason


def _table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *body))
