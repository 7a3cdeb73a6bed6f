"""The counts of all programs that were run so far, in a file that is part of the repository: sessions add to it. The
page on proofs has its tables (`documentation/parts.py`)."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("counts.json")
OUTCOMES = ("equal", "refused", "wrong", "crash")
_FEWEST = 8  # programs of an operator in the table of refusals
_TIMES_USUAL = 1.5  # how often its programs are refused, at least, in relation to all programs
Counts = dict[str, dict[str, dict[str, int]]]  # by kind (plans, axes, operators), name and outcome


def read_counts(file: Path = FILE) -> Counts:
    return json.loads(file.read_text()) if file.exists() else {}


def add_rows(counts: Counts, rows: Iterable[Mapping[str, Any]]) -> Counts:
    """Returns the counts with those of more programs."""
    added = json.loads(json.dumps(counts))
    for row in rows:
        names = {"all": ["programs"], "plans": [row["plan"]], "axes": row["axes"], "operators": set(row["operators"])}
        for kind, of_kind in names.items():
            for name in of_kind:
                outcomes = added.setdefault(kind, {}).setdefault(name, {})
                outcomes[row["outcome"]] = outcomes.get(row["outcome"], 0) + 1
    return {kind: dict(sorted(names.items())) for kind, names in added.items()}


def write_counts(counts: Counts, file: Path = FILE) -> None:
    file.write_text(json.dumps(counts, indent=1) + "\n")


def page_tables(counts: Counts) -> list[str]:
    """Two tables for the page on proofs: outcomes by axis, and the operators whose programs are refused most often."""
    total = Counter(counts["all"]["programs"])
    usual = total["refused"] / total.total()
    operators = counts["operators"]
    fewest = min(sum(outcomes.values()) for outcomes in operators.values())
    often = {
        name: outcomes
        for name, outcomes in operators.items()
        if sum(outcomes.values()) >= _FEWEST and _refused(outcomes) >= _TIMES_USUAL * usual
    }
    return [
        f"{total.total():,} programs of {len(operators)} operators (at least {fewest} programs of each) under"
        f" {len(counts['plans'])} kinds of plans: " + ", ".join(f"{total[name]:,} {name}" for name in OUTCOMES) + ".",
        "",
        *_table("axis", counts["axes"]),
        "",
        f"{usual:.0%} of all programs are refused. Operators in at least {_FEWEST} programs of which more than"
        f" {_TIMES_USUAL:g} times as many are:",
        "",
        "| operator | programs | refused |",
        "| --- | ---: | ---: |",
        *(
            f"| {name} | {sum(outcomes.values())} | {outcomes['refused']} |"
            for name, outcomes in sorted(often.items(), key=lambda item: (-_refused(item[1]), item[0]))
        ),
    ]


def fuzz_part() -> str:
    """The part of the page on proofs."""
    return "\n".join(page_tables(read_counts()))


def _refused(outcomes: Mapping[str, int]) -> float:
    return outcomes.get("refused", 0) / sum(outcomes.values())


def _table(title: str, counts: Mapping[str, Mapping[str, int]]) -> Sequence[str]:
    return [
        f"| {title} | programs | " + " | ".join(OUTCOMES) + " |",
        "| --- " + "| ---: " * (1 + len(OUTCOMES)) + "|",
        *(
            f"| {name} | {sum(outcomes.values())} | " + " | ".join(str(outcomes.get(key, 0)) for key in OUTCOMES) + " |"
            for name, outcomes in counts.items()
        ),
    ]
