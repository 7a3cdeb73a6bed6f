"""`python -m validation.predictions.features [FEATURE …]` predicts the published runs with experts, context, fp8, and
on GPUs that were added later (validation/runs/features.py), and scores them apart from the others. Rows on older GPUs
have many different models, and are predicted only if they are named.

Nothing is fitted: the launch factor is 1, and all other values of a prediction come from catalogs, calibrations of the
reference GPU and engines.yaml. The guess is `similar_models` of validation/runs/baseline.py: its share of the peak rate
is that of rows of unrelated sources, with the same GPU and precision where there are any, otherwise of all of them.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import MeshwrightError
from validation.predictions.predict import Profiles, predict_case, traced
from validation.predictions.score import Errors, errors_of
from validation.runs.baseline import guess_step_s, timed_cases
from validation.runs.case import PublishedCase
from validation.runs.cover import cover
from validation.runs.features import FEATURES, Feature, feature_of
from validation.runs.reading.hardware import device_of

REPORTED: tuple[Feature, ...] = ("experts", "context", "newer GPUs", "fp8")  # rows on older GPUs only if asked for
FILE = Path(__file__).parents[1] / "report_features.md"


@dataclass(frozen=True)
class FeatureScore:
    """The errors of the predictions and of the guess for a group of rows."""

    name: str
    errors: Errors
    guess: Errors


def cases_of(features: Iterable[Feature] = REPORTED, every: int = 1) -> list[PublishedCase]:
    """The timed cases with one of these features: every n-th of each feature, in the order of the rows."""
    chosen: list[PublishedCase] = []
    for feature in features:
        chosen += [case for case in cover().cases if feature_of(case) == feature and case.step_s][::every]
    return chosen


def predicted_seconds(
    cases: Iterable[PublishedCase], profiles: Profiles = traced, progress: Callable[[str], None] = lambda _: None
) -> dict[str, float]:
    """The predicted seconds of each case by its id. A case that cannot be predicted is left out, with its reason in
    `progress`."""
    seconds: dict[str, float] = {}
    for case in cases:
        try:
            seconds[case.id] = predict_case(case, profiles).step_s
            assert case.step_s is not None
            progress(f"{case.id}: {seconds[case.id] / case.step_s - 1:+.1%}")
        except MeshwrightError as error:
            progress(f"{case.id}: {error}")
    return seconds


def guessed_seconds(cases: Sequence[PublishedCase]) -> dict[str, float]:
    """The guessed seconds of these cases, from all covered rows of sources that are not related to theirs."""
    ids = {case.id for case in cases}
    kinds = {case.sample.kind for case in cases}
    calibration = [case for case in cover().cases if case.sample.kind in kinds]
    guessed = guess_step_s(timed_cases(calibration), "similar_models")
    return {name: value for name, value in guessed.items() if name in ids}


def scores(
    cases: Iterable[PublishedCase],
    predicted: Mapping[str, float],
    guessed: Mapping[str, float],
    group: Callable[[PublishedCase], str],
) -> list[FeatureScore]:
    """The scores of all groups of the predicted cases."""
    groups: dict[str, list[PublishedCase]] = {}
    for case in cases:
        if case.id in predicted:
            groups.setdefault(group(case), []).append(case)
    return [FeatureScore(name, errors_of(own, predicted), errors_of(own, guessed)) for name, own in groups.items()]


def markdown(cases: Sequence[PublishedCase], predicted: Mapping[str, float], guessed: Mapping[str, float]) -> str:
    """The report: by feature, by source, and by model and GPU."""
    tables = [
        _table("feature", scores(cases, predicted, guessed, lambda case: str(feature_of(case)))),
        _table("source", scores(cases, predicted, guessed, lambda case: case.source)),
        _table("GPU", scores(cases, predicted, guessed, lambda case: device_of(case.cluster).name)),
    ]
    (total,) = scores(cases, predicted, guessed, lambda _: "all")
    return "\n\n".join(
        [
            "# Predicted step times of published runs with experts, context, fp8 and later GPUs",
            "This file is written by `python -m validation.predictions.features`. These rows are not among those of"
            " `validation/report.md`: they were left out until Meshwright predicted the expert and context axes, fp8"
            " and these GPUs.",
            "Nothing is fitted to any row: the launch factor is 1. The guess knows rows of unrelated sources only; for"
            " GPUs and precisions that none of them has, it takes the share of the peak rate that all of them reach.",
            f"All {total.errors.rows} rows: median {total.errors.median:.1%}, p90 {total.errors.p90:.1%}; guess"
            f" {total.guess.median:.1%} and {total.guess.p90:.1%}.",
            *tables,
        ]
    )


def _table(title: str, rows: Iterable[FeatureScore]) -> str:
    lines = [f"| {title} | rows | median | p90 | guess: median | p90 |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        errors = " | ".join(
            f"{value:.1%}" for value in (row.errors.median, row.errors.p90, row.guess.median, row.guess.p90)
        )
        lines.append(f"| {row.name} | {row.errors.rows} | {errors} |")
    return "\n".join(lines)


def main() -> None:
    chosen = [feature for feature in FEATURES if feature in (sys.argv[1:] or REPORTED)]
    cases = cases_of(chosen)
    predicted = predicted_seconds(cases, progress=lambda line: print(line, file=sys.stderr, flush=True))
    text = markdown(cases, predicted, guessed_seconds([case for case in cases if case.id in predicted]))
    if not sys.argv[1:]:
        FILE.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
