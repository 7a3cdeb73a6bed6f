"""`meshwright explain RUN`: why a run was slower than predicted, rank by rank, from its own measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.errors import InputError
from meshwright.files.user_path import user_path
from meshwright.numbers.units import seconds_text
from meshwright.plan import Plan
from meshwright.plan_fields.constraints import FIELDS, default_of, shown
from meshwright.planner.questions.answer import Answer
from meshwright.report.run.kinds import (
    COMPUTING,
    EXCHANGING,
    FOR_DATA,
    FOR_OTHERS,
    KINDS,
    OTHER,
    kinds_by_rank,
    kinds_of_windows,
    mean_kinds,
    predicted_kinds,
)
from meshwright.report.run.record import read_run
from meshwright.train.output.folder import read_reasons

_SLOW = 1.1  # a rank whose own work takes this much longer than that of the others is named
_OWN_WORK = (COMPUTING, FOR_DATA, OTHER)  # what a rank does without the others
_MANY_TIMES = 2.0  # above it, a step is said to take so many times as long, instead of a percentage
_CLOSE = 0.05  # of the step: a difference below it is within the error of predictions
_ADVICE = {
    COMPUTING: "operators take longer than predicted: `meshwright doctor --calibrate` measures them, and other"
    " processes on the machine slow them down",
    EXCHANGING: "exchanges take longer than predicted: `meshwright doctor` measures the links",
    FOR_OTHERS: "ranks come to exchanges before others that have more to do",
    FOR_DATA: "the loader has no batch ready: raise data.workers, or use smaller or decoded files",
    OTHER: "logging and callbacks: raise log.every_steps, or make callbacks cheaper",
}


@dataclass(frozen=True)
class SlowRank:
    """A rank that the others wait for. `relative` is its own work, over the median of the other ranks; `cause` the kind
    of work of which it has most more than they have: `seconds` instead of `others_s`."""

    rank: int
    relative: float
    cause: str
    seconds: float
    others_s: float

    def describe(self) -> str:
        return (
            f"The others wait for rank {self.rank}, whose own work takes {self.relative:.2f} times as long as theirs:"
            f" {seconds_text(self.seconds)} of {self.cause} instead of {seconds_text(self.others_s)}."
        )


def slow_ranks(by_rank: Mapping[int, Mapping[str, float]]) -> list[SlowRank]:
    """The ranks whose own work takes at least 10% longer than that of the others, the slowest first."""
    found = []
    for rank, kinds in by_rank.items():
        others = [other for number, other in by_rank.items() if number != rank]
        if not others:
            continue
        typical = {kind: median(other[kind] for other in others) for kind in _OWN_WORK}
        of_others = median(sum(other[kind] for kind in _OWN_WORK) for other in others)
        relative = sum(kinds[kind] for kind in _OWN_WORK) / of_others if of_others else 1.0
        if relative >= _SLOW:
            cause = max(_OWN_WORK, key=lambda kind: kinds[kind] - typical[kind])
            found.append(SlowRank(rank, relative, cause, kinds[cause], typical[cause]))
    return sorted(found, key=lambda slow: -slow.relative)


def explain_run(folder: str | Path) -> Answer:
    """Returns why a run was slower than predicted, rank by rank, from the times that it has recorded; nothing of the
    run is executed. Raises an `InputError` if it has no prediction or no times.

    >>> import meshwright as mw
    >>> mw.explain_run("runs/none")
    Traceback (most recent call last):
    meshwright.errors.InputError: runs/none: there is no such folder: name a run folder that `train` wrote, ...
    """
    run = read_run(user_path(folder, "the run folder"))
    windows = kinds_of_windows(run.ranks)
    prediction = run.page.get("prediction")
    breakdown = prediction.get("breakdown") if isinstance(prediction, Mapping) else None
    if not windows:
        raise InputError(f"{folder}: this run has recorded no times of its ranks, so there is nothing to explain")
    if not isinstance(prediction, Mapping) or not isinstance(breakdown, Mapping):
        raise InputError(
            f"{folder}: this run has no prediction, because its machine was not measured or its plan could not be"
            " predicted: run meshwright doctor once, and train again"
        )
    if not all(isinstance(value, int | float) and isfinite(value) for value in breakdown.values()):
        raise InputError(f"{folder}: the prediction of this run (page.json) is damaged: its terms are not all numbers")
    predicted = predicted_kinds(breakdown)
    later = windows[1:] if len(windows) > 1 else windows  # the first steps allocate and compile
    by_rank, mean = kinds_by_rank(later), mean_kinds(row for window in later for row in window)
    predicted_s, measured_s = sum(predicted.values()), sum(mean.values())
    if not isfinite(measured_s):
        raise InputError(f"{folder}: the recorded times of this run are damaged: not all of them are finite numbers")
    rows = [("predicted", *(seconds_text(predicted[kind]) for kind in KINDS), seconds_text(predicted_s))]
    rows += [
        (f"rank {rank}", *(seconds_text(kinds[kind]) for kind in KINDS), seconds_text(sum(kinds.values())))
        for rank, kinds in by_rank.items()
    ]
    values: dict[str, Any] = {
        "run": str(folder),
        "predicted_step_s": predicted_s,
        "measured_step_s": measured_s,
        "predicted": predicted,
        "rows": [{"rank": rank, **kinds} for rank, kinds in by_rank.items()],
        "differences": {kind: mean[kind] - predicted[kind] for kind in KINDS},
    }
    slow = slow_ranks(by_rank)
    values["slow_ranks"] = [{"rank": one.rank, "relative": one.relative, "cause": one.cause} for one in slow]
    sentences = _sentences(predicted, mean, slow)
    if run.plan is not None and len(by_rank) < run.plan.world_size:
        sentences.append(
            f"Only {len(by_rank)} of {run.plan.world_size} ranks have recorded times, so waiting for the others counts"
            " as exchanging."
        )
    if run.plan is not None:
        values["reasons"] = read_reasons(run.folder)
        sentences += _why_this_plan(run.plan, values["reasons"])
    if isinstance(based_on := prediction.get("based_on"), str):
        sentences.append(f"The prediction is based on constants of the hardware that are {based_on}.")
    return Answer("slower_run", ("a step", *KINDS, "whole step"), tuple(rows), tuple(sentences), values)


def _why_this_plan(plan: Plan, reasons: Mapping[str, str]) -> list[str]:
    """A sentence for each reason, with the fields of the plan that have it and another value than their default."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        group, _, own = name.partition(".")
        if name in FIELDS and (value := getattr(getattr(plan, group), own)) != default_of(name):
            by_reason.setdefault(reason, []).append(f"{name} {shown(value)}")
    return [f"Why {', '.join(fields)}: {reason}." for reason, fields in by_reason.items()]


def _sentences(predicted: Mapping[str, float], mean: Mapping[str, float], slow: Sequence[SlowRank]) -> list[str]:
    predicted_s, measured_s = sum(predicted.values()), sum(mean.values())
    gap, ratio = measured_s - predicted_s, measured_s / predicted_s if predicted_s else 1.0
    if abs(gap) <= _CLOSE * predicted_s:
        first = f"The run was as fast as predicted: {seconds_text(measured_s)} a step, within 5% of the prediction."
    elif ratio >= _MANY_TIMES:
        first = (
            f"A step took {seconds_text(measured_s)}, {ratio:.3g} times as long as the predicted"
            f" {seconds_text(predicted_s)}."
        )
    else:
        word = "slower" if gap > 0 else "faster"
        first = (
            f"A step took {seconds_text(measured_s)}, {abs(gap) / predicted_s:.0%} {word} than the predicted"
            f" {seconds_text(predicted_s)}."
        )
    sentences = [first, *(rank.describe() for rank in slow[:5])]
    differences = sorted(((mean[kind] - predicted[kind], kind) for kind in KINDS), reverse=True)
    for extra, kind in differences:
        if extra > _CLOSE / 2 * max(predicted_s, measured_s):
            sentences.append(f"{seconds_text(extra)} more of {kind} than predicted: {_ADVICE[kind]}.")
    return sentences
