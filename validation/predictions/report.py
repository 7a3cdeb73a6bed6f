"""Predicts and scores all published cases, by source, and lists every row that is not predicted with the reason.

The step time of a case is predicted three times: without a fitted factor, with the launch factor that `fit.py` fits to
the rows of unrelated sources, and by the guess of validation/runs/baseline.py (`similar_models`), which is calibrated
without the source that it is judged on. `skill` is the median error of the guess divided by that of the prediction.

A source is not judged if it measured the same case twice with step times so different that no prediction can be near
both. Its errors are shown, and count only in the totals over every row (`every_`) and of memory.

A short run takes every n-th row of a source: at most `ROWS_PER_SOURCE` of them, or `ROWS_PER_SLOW_SOURCE` for the
sources in which nearly every row has a model of its own, because each model must be traced.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from meshwright.errors import MeshwrightError
from validation.predictions.fit import LaunchFactor, fit
from validation.predictions.predict import PredictedCase, Profiles, fits, predict_case, traced
from validation.predictions.score import Alarms, Errors, Order, alarms, errors_of, order_of, spread
from validation.runs.baseline import guess_step_s, timed_cases
from validation.runs.case import PublishedCase
from validation.runs.cover import Coverage, cover
from validation.runs.features import feature_of

SLOW_SOURCES = ("ryujaehun_cnn", "llm_foundry", "bigscience_a100")
SLOW_MODEL = "densenet"  # takes a minute to trace
ROWS_PER_SOURCE, ROWS_PER_SLOW_SOURCE = 60, 12
# The bars that every source is compared with.
MEDIAN_BAR, P90_BAR, TAU_BAR, FALSE_ALARMS_BAR = 0.10, 0.25, 0.8, 0.05
# If two step times of one case differ by a larger ratio, no prediction is within P90_BAR of both.
WIDEST_SPREAD = (1 + P90_BAR) / (1 - P90_BAR)
# Where the median error of the guess exceeds HARD_GUESS, the prediction must be SKILL_BAR times better than the guess.
HARD_GUESS, SKILL_BAR = 0.15, 2.0
Progress = Callable[[str], None]


@dataclass(frozen=True)
class SourceScore:
    """The scores of one source: the errors of the predictions with and without the fitted launch factor, and of the
    guess. `order` is None if the source has no two plans to order. `spread` is the largest ratio between two measured
    step times of one case."""

    source: str
    rows: int
    fitted_errors: Errors
    unfitted_errors: Errors
    guess_errors: Errors
    order: Order | None
    alarms: Alarms
    spread: float = 1.0

    @property
    def judged(self) -> bool:
        return self.spread <= WIDEST_SPREAD

    @property
    def skill(self) -> float:
        return self.guess_errors.median / max(self.fitted_errors.median, 1e-9)

    def missed(self) -> tuple[str, ...]:
        """The names of the bars that the source misses. The bar of tau needs at least two plans to order."""
        bars = {
            "median": self.fitted_errors.median > MEDIAN_BAR,
            "p90": self.fitted_errors.p90 > P90_BAR,
            "skill": self.guess_errors.median > HARD_GUESS and self.skill < SKILL_BAR,
            "tau": self.order is not None and self.order.tau < TAU_BAR,
            "alarms": self.alarms.false_alarms > FALSE_ALARMS_BAR * self.alarms.ran,
            "calls": self.alarms.called < self.alarms.failed,
        }
        return tuple(name for name, is_missed in bars.items() if is_missed)


@dataclass(frozen=True)
class Report:
    """All predictions and scores. `factors` has the launch factor of each source, `reasons` by row id why a row was not
    predicted."""

    scores: tuple[SourceScore, ...]
    predicted: tuple[PredictedCase, ...]
    factors: dict[str, LaunchFactor]
    reasons: dict[str, str]

    def overall(self) -> dict[str, float]:
        """Totals. Over the judged sources: `rows`, `median`, `p90`, `median_of_sources` and `tau`; the number of
        `sources`, how many are `passing` every bar, how many have a `hard` guess, and how many of those are `skilled`.
        Over every source: `every_rows`, `every_median`, `every_p90`, `every_tau`, and the shares of `false_alarms` and
        `called` out-of-memory runs."""
        judged = [score for score in self.scores if score.judged]
        errors, tau = self._errors_and_tau(judged)
        every, every_tau = self._errors_and_tau(self.scores)
        memory = [score.alarms for score in self.scores]
        hard = [score for score in judged if score.guess_errors.median > HARD_GUESS]
        return {
            "rows": errors.rows,
            "median": errors.median,
            "p90": errors.p90,
            "median_of_sources": median(score.fitted_errors.median for score in judged),
            "tau": tau,
            "sources": len(judged),
            "passing": sum(not score.missed() for score in judged),
            "hard": len(hard),
            "skilled": sum(score.skill >= SKILL_BAR for score in hard),
            "every_rows": every.rows,
            "every_median": every.median,
            "every_p90": every.p90,
            "every_tau": every_tau,
            "false_alarms": sum(a.false_alarms for a in memory) / max(1, sum(a.ran for a in memory)),
            "called": sum(a.called for a in memory) / max(1, sum(a.failed for a in memory)),
        }

    def _errors_and_tau(self, scores: Sequence[SourceScore]) -> tuple[Errors, float]:
        sources = {score.source for score in scores}
        predictions = [prediction for prediction in self.predicted if prediction.case.source in sources]
        orders = [score.order for score in scores if score.order is not None]
        tau = sum(order.tau * order.pairs for order in orders) / max(1, sum(order.pairs for order in orders))
        predicted_s = {prediction.case.id: prediction.step_s for prediction in predictions}
        return errors_of([prediction.case for prediction in predictions], predicted_s), tau

    def counted_reasons(self) -> Counter[str]:
        """The number of rows that were not predicted, by "source: reason"."""
        return Counter(f"{row.rpartition('-')[0]}: {reason}" for row, reason in self.reasons.items())


def make_report(
    every_row: bool = False,
    coverage: Coverage | None = None,
    profiles: Profiles = traced,
    progress: Progress = lambda _: None,
) -> Report:
    """Predicts and scores the cases of `coverage`, or of all published rows if it is None. Unless `every_row` is set,
    it takes only the rows of a short run. `progress` is called with one line of text for each case."""
    covered = coverage or _without_features(cover())
    reasons = dict(covered.reasons)
    cases = _cases_of_run(covered.cases, every_row, reasons)
    unfitted: list[PredictedCase] = []
    fits_memory: dict[str, bool] = {}
    for number, case in enumerate(cases):
        progress(f"{number + 1} of {len(cases)}: {case.id}")
        try:
            if case.step_s is not None:
                unfitted.append(predict_case(case, profiles))
            if _states_memory(case):
                fits_memory[case.id] = fits(case, profiles)
        except MeshwrightError as error:
            reasons[case.id] = str(error)
    factors = fit(unfitted)
    fitted = tuple(
        predict_case(prediction.case, profiles, factors[prediction.case.source].launch) for prediction in unfitted
    )
    return Report(tuple(_scores(covered.cases, cases, unfitted, fitted, fits_memory)), fitted, factors, reasons)


def _without_features(coverage: Coverage) -> Coverage:
    """The coverage without the cases that predictions/features.py judges apart."""
    features = {case.id: feature_of(case) for case in coverage.cases}
    apart = {
        row: f"{feature}: judged apart (validation/report_features.md)" for row, feature in features.items() if feature
    }
    return Coverage(tuple(case for case in coverage.cases if case.id not in apart), {**coverage.reasons, **apart})


def _cases_of_run(cases: Sequence[PublishedCase], every_row: bool, reasons: dict[str, str]) -> list[PublishedCase]:
    """The cases that this run predicts. The reasons why it does not predict the others are added to `reasons`."""
    if every_row:
        return list(cases)
    counts = Counter(case.source for case in cases)
    counted: Counter[str] = Counter()
    cases_of_short_run = []
    for case in cases:
        if SLOW_MODEL in case.model.call:
            reasons[case.id] = "its model takes long to trace: only with --all"
            continue
        most = ROWS_PER_SLOW_SOURCE if case.source in SLOW_SOURCES else ROWS_PER_SOURCE
        interval = -(-counts[case.source] // most)
        if case.oom or counted[case.source] % interval == 0:
            cases_of_short_run.append(case)
        else:
            reasons[case.id] = "not among the rows of a short run: only with --all"
        counted[case.source] += 1
    return cases_of_short_run


def _states_memory(case: PublishedCase) -> bool:
    """Whether the memory of the case can be predicted: the row must state its recomputation, in a form that a plan can
    express."""
    return case.sample.kind == "tokens" and not any("recompu" in default for default in case.defaults)


def _scores(
    covered: Sequence[PublishedCase],
    cases: Sequence[PublishedCase],
    unfitted: Sequence[PredictedCase],
    fitted: Sequence[PredictedCase],
    fits_memory: dict[str, bool],
) -> list[SourceScore]:
    fitted_s = {prediction.case.id: prediction.step_s for prediction in fitted}
    unfitted_s = {prediction.case.id: prediction.step_s for prediction in unfitted}
    guessed_s = guess_step_s(timed_cases([prediction.case for prediction in unfitted]), "similar_models")
    scores = []
    for source in dict.fromkeys(prediction.case.source for prediction in unfitted):
        timed = [prediction.case for prediction in unfitted if prediction.case.source == source]
        scores.append(
            SourceScore(
                source,
                len(timed),
                errors_of(timed, fitted_s),
                errors_of(timed, unfitted_s),
                errors_of(timed, guessed_s),
                order_of(timed, fitted_s),
                alarms([case for case in cases if case.source == source], fits_memory),
                spread(case for case in covered if case.source == source),
            )
        )
    return scores


def as_json(report: Report) -> dict[str, Any]:
    """The report as JSON: `rows` has the predictions, `summary` the scores by source (with the totals as `all`), and
    `not_covered` the number of rows for each reason."""
    rows = [
        {
            "id": prediction.case.id,
            "measured_s": prediction.case.step_s,
            "predicted_s": prediction.step_s,
            "breakdown": prediction.breakdown,
            "factors": asdict(report.factors[prediction.case.source]),
            "defaults": prediction.case.defaults,
        }
        for prediction in report.predicted
    ]
    summary = {score.source: _score_as_json(score) for score in report.scores}
    return {
        "rows": rows,
        "summary": {"all": report.overall(), **summary},
        "not_covered": dict(report.counted_reasons()),
    }


def _score_as_json(score: SourceScore) -> dict[str, Any]:
    return {
        "source": score.source,
        "rows": score.rows,
        "fitted": asdict(score.fitted_errors),
        "plain": asdict(score.unfitted_errors),
        "guessed": asdict(score.guess_errors),
        "order": asdict(score.order) if score.order else None,
        "alarms": asdict(score.alarms),
        "apart": score.spread,
        "skill": score.skill,
        "judged": score.judged,
        "missed": score.missed(),
    }
