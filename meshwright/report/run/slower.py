"""`meshwright explain RUN`: why a run was slower than predicted, rank by rank, from its own measurements."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files.user_path import user_path
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
    rank_speeds,
)
from meshwright.report.run.record import read_run
from meshwright.report.units import seconds_text

_SLOW = 1.1  # a rank whose computing takes this much longer than the median is named
_CLOSE = 0.05  # of the step: a difference below it is within the error of predictions
_ADVICE = {
    COMPUTING: "operators take longer than predicted: `meshwright doctor --calibrate` measures them, and other"
    " processes on the machine slow them down",
    EXCHANGING: "exchanges take longer than predicted: `meshwright doctor` measures the links",
    FOR_OTHERS: "ranks wait for a slower one, which the table shows by its longer computing",
    FOR_DATA: "the loader has no batch ready: raise data.workers, or use smaller or decoded files",
    OTHER: "logging and callbacks: raise log.every_steps, or make callbacks cheaper",
}


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
    predicted = predicted_kinds(breakdown)
    later = windows[1:] if len(windows) > 1 else windows  # the first steps allocate and compile
    by_rank, mean = kinds_by_rank(later), mean_kinds(row for window in later for row in window)
    predicted_s, measured_s = sum(predicted.values()), sum(mean.values())
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
    slow = [speed for speed in rank_speeds(later) if speed.relative >= _SLOW] if len(by_rank) > 1 else []
    values["slow_ranks"] = [{"rank": speed.rank, "relative": speed.relative} for speed in slow]
    sentences = _sentences(predicted, mean, [(speed.rank, speed.relative) for speed in slow])
    return Answer("slower_run", ("a step", *KINDS, "whole step"), tuple(rows), tuple(sentences), values)


def _sentences(
    predicted: Mapping[str, float], mean: Mapping[str, float], slow: Sequence[tuple[int, float]]
) -> list[str]:
    predicted_s, measured_s = sum(predicted.values()), sum(mean.values())
    gap = measured_s - predicted_s
    if abs(gap) <= _CLOSE * predicted_s:
        first = f"The run was as fast as predicted: {seconds_text(measured_s)} a step, within 5% of the prediction."
    else:
        word = "slower" if gap > 0 else "faster"
        first = (
            f"A step took {seconds_text(measured_s)}, {abs(gap) / predicted_s:.0%} {word} than the predicted"
            f" {seconds_text(predicted_s)}."
        )
    sentences = [first]
    differences = sorted(((mean[kind] - predicted[kind], kind) for kind in KINDS), reverse=True)
    for extra, kind in differences:
        if extra > _CLOSE / 2 * predicted_s:
            sentences.append(f"{seconds_text(extra)} more of {kind}: {_ADVICE[kind]}.")
    for rank, relative in slow[:5]:
        sentences.append(
            f"Rank {rank} computes {relative:.2f} times as long as the median rank, and others wait for it."
        )
    return sentences
