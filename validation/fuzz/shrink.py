"""Makes a failing case smaller for as long as it fails in the same way."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from validation.fuzz.program import Case, with_place
from validation.fuzz.render import is_consistent
from validation.fuzz.training.outcome import Outcome

Run = Callable[[Case], Outcome]


def shrink(case: Case, outcome: Outcome, run: Run, most_runs: int = 80) -> tuple[Case, Outcome]:
    """Returns the smallest case that was found with the same kind of outcome, and its outcome. `run` runs a case."""
    runs = 0
    progress = True
    while progress and runs < most_runs:
        progress = False
        for smaller in _smaller_cases(case):
            runs += 1
            result = run(smaller)
            if is_same(result, outcome):
                case, outcome, progress = smaller, result, True
                break
            if runs >= most_runs:
                break
    return case, outcome


def is_same(result: Outcome, wanted: Outcome) -> bool:
    """Whether two failures are of one kind; two exceptions also have the same class."""
    if result.kind != wanted.kind:
        return False
    return result.kind != "crash" or _class_of(result.reason) == _class_of(wanted.reason)


def _class_of(reason: str) -> str:
    return reason.strip().splitlines()[-1].partition(":")[0] if reason.strip() else ""


def _smaller_cases(case: Case) -> Iterator[Case]:
    """Simpler cases, those that leave out most first."""
    simple: dict[str, Any] = {
        "optimizer": "SGD",
        "loss": "mean",
        "door": "share",
        "clip_norm": None,
        "last_batch": case.batch,
    }
    changes = {name: value for name, value in simple.items() if getattr(case, name) != value}
    if len(changes) > 1:
        yield replace(case, **changes)
    yield from _shorter_programs(case)
    for name, value in changes.items():
        yield replace(case, **{name: value})
    if case.steps > 1:
        yield replace(case, steps=1)
    program = case.program
    if program.tied_head:
        yield replace(case, program=replace(program, tied_head=False))
    if program.pooled and program.kind != "vectors":
        yield replace(case, program=replace(program, pooled=False))


def _shorter_programs(case: Case) -> Iterator[Case]:
    """Programs without the statements of a place, and without a few that follow each other."""
    program = case.program
    for length in (None, 4, 3, 2, 1):
        for index, place in enumerate(program.places):
            count = len(place) if length is None else length
            if not place or (length is not None and count >= len(place) > 1):
                continue
            for start in range(len(place) - count + 1):
                shorter = with_place(program, index, (*place[:start], *place[start + count :]))
                if program.equal_blocks and index >= len(program.gaps):
                    shorter = replace(shorter, blocks=(shorter.blocks[0],) * len(program.blocks))
                if is_consistent(shorter):
                    yield replace(case, program=shorter)
