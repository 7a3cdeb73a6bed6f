"""All cases predicted, fitted and scored, by source; and every row that is not, with the reason.

A case is predicted three times: without any factor, with the launch factor that `fit` reads from other sources, and
by the guess of validation/runs/baseline.py (`similar_models`), which also goes without the source that it is judged on.
`skill` is the guess's median error over ours. A source whose repeated measurements of a case are too far apart for
any prediction to be near both is shown and not judged: it counts only in the totals of every row, and of memory. A
short run takes every n-th row of a source, at most `MOST`, and `FEW` where nearly every row has a model of its own to
trace (`LONG`).
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

LONG = ("ryujaehun_cnn", "llm_foundry", "bigscience_a100")
SLOW = "densenet"  # a minute to trace
MOST, FEW = 60, 12
MEDIAN, P90, TAU, FALSE_ALARMS = 0.10, 0.25, 0.8, 0.05  # the bars of every source
WIDEST_SPREAD = (1 + P90) / (1 - P90)  # two steps of a case further apart are not both within P90 of any prediction
GUESS, SKILL = 0.15, 2.0  # where the guess is off by more than this, ours has to be so many times better
Progress = Callable[[str], None]


@dataclass(frozen=True)
class SourceScore:
    """The scores of one source. `fitted` are the errors of ours, `plain` of ours without any factor, `guessed` of the
    baseline; `apart` is the spread of the source's repeated measurements of a case."""

    source: str
    rows: int
    fitted: Errors
    plain: Errors
    guessed: Errors
    order: Order | None
    alarms: Alarms
    apart: float = 1.0

    @property
    def judged(self) -> bool:
        return self.apart <= WIDEST_SPREAD

    @property
    def skill(self) -> float:
        return self.guessed.median / max(self.fitted.median, 1e-9)

    def missed(self) -> tuple[str, ...]:
        """The bars that the source misses; a bar for something that it does not have is not missed."""
        bars = {
            "median": self.fitted.median > MEDIAN,
            "p90": self.fitted.p90 > P90,
            "skill": self.guessed.median > GUESS and self.skill < SKILL,
            "tau": self.order is not None and self.order.tau < TAU,
            "alarms": self.alarms.false_alarms > FALSE_ALARMS * self.alarms.ran,
            "calls": self.alarms.called < self.alarms.failed,
        }
        return tuple(name for name, is_missed in bars.items() if is_missed)


@dataclass(frozen=True)
class Report:
    """All predictions and scores. `reasons` says, by row, why it was not predicted; `factors` are by source."""

    scores: tuple[SourceScore, ...]
    predicted: tuple[PredictedCase, ...]
    factors: dict[str, LaunchFactor]
    reasons: dict[str, str]

    def overall(self) -> dict[str, float]:
        """Figures of the sources that are judged: of all rows together, of the middle source, and of the order of
        plans. Of every source: errors and order again (`every_`), false alarms and calls."""
        judged = [score for score in self.scores if score.judged]
        errors, tau = self._errors_and_tau(judged)
        every, every_tau = self._errors_and_tau(self.scores)
        memory = [score.alarms for score in self.scores]
        hard = [score for score in judged if score.guessed.median > GUESS]
        return {
            "rows": errors.rows,
            "median": errors.median,
            "p90": errors.p90,
            "median_of_sources": median(score.fitted.median for score in judged),
            "tau": tau,
            "sources": len(judged),
            "passing": sum(not score.missed() for score in judged),
            "hard": len(hard),
            "skilled": sum(score.skill >= SKILL for score in hard),
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
        return Counter(f"{row.rpartition('-')[0]}: {reason}" for row, reason in self.reasons.items())


def report(
    everything: bool = False,
    coverage: Coverage | None = None,
    profiles: Profiles = traced,
    progress: Progress = lambda _: None,
) -> Report:
    """Predicts and scores the cases of `coverage`, or of all carried rows; without `everything` a part of them."""
    covered = coverage or cover()
    reasons = dict(covered.reasons)
    cases = _cases_of_run(covered.cases, everything, reasons)
    plain: list[PredictedCase] = []
    fitting: dict[str, bool] = {}
    for number, case in enumerate(cases):
        progress(f"{number + 1} of {len(cases)}: {case.id}")
        try:
            if case.step_s is not None:
                plain.append(predict_case(case, profiles))
            if _states_memory(case):
                fitting[case.id] = fits(case, profiles)
        except MeshwrightError as error:
            reasons[case.id] = str(error)
    factors = fit(plain)
    fitted = tuple(
        predict_case(prediction.case, profiles, factors[prediction.case.source].launch) for prediction in plain
    )
    return Report(tuple(_scores(covered.cases, cases, plain, fitted, fitting)), fitted, factors, reasons)


def _cases_of_run(cases: Sequence[PublishedCase], everything: bool, reasons: dict[str, str]) -> list[PublishedCase]:
    """The cases that are predicted; why the others are not is added to `reasons`."""
    if everything:
        return list(cases)
    counts = Counter(case.source for case in cases)
    seen: Counter[str] = Counter()
    short = []
    for case in cases:
        if SLOW in case.model.call:
            reasons[case.id] = "its model takes long to trace: only with --all"
            continue
        every = -(-counts[case.source] // (FEW if case.source in LONG else MOST))
        if case.oom or seen[case.source] % every == 0:
            short.append(case)
        else:
            reasons[case.id] = "not among the rows of a short run: only with --all"
        seen[case.source] += 1
    return short


def _states_memory(case: PublishedCase) -> bool:
    """Whether the memory of the case can be predicted: its recomputation must be stated, and a plan must be able to
    say it."""
    return case.sample.kind == "tokens" and not any("recompu" in default for default in case.defaults)


def _scores(
    covered: Sequence[PublishedCase],
    cases: Sequence[PublishedCase],
    plain: Sequence[PredictedCase],
    fitted: Sequence[PredictedCase],
    fitting: dict[str, bool],
) -> list[SourceScore]:
    fitted_s = {prediction.case.id: prediction.step_s for prediction in fitted}
    plain_s = {prediction.case.id: prediction.step_s for prediction in plain}
    guessed_s = guess_step_s(timed_cases([prediction.case for prediction in plain]), "similar_models")
    scores = []
    for source in dict.fromkeys(prediction.case.source for prediction in plain):
        timed = [prediction.case for prediction in plain if prediction.case.source == source]
        scores.append(
            SourceScore(
                source,
                len(timed),
                errors_of(timed, fitted_s),
                errors_of(timed, plain_s),
                errors_of(timed, guessed_s),
                order_of(timed, fitted_s),
                alarms([case for case in cases if case.source == source], fitting),
                spread(case for case in covered if case.source == source),
            )
        )
    return scores


def as_json(report: Report) -> dict[str, Any]:
    """The report as JSON: `rows` by case, `summary` by source, `not_covered` with the number of rows for each
    reason."""
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
    summary = {
        score.source: {**asdict(score), "skill": score.skill, "judged": score.judged, "missed": score.missed()}
        for score in report.scores
    }
    return {
        "rows": rows,
        "summary": {"all": report.overall(), **summary},
        "not_covered": dict(report.counted_reasons()),
    }


def lines(report: Report) -> list[str]:
    head = f"{'source':22}{'rows':>5}{'ours':>9}{'p90':>8}{'unfitted':>10}{'p90':>8}{'guess':>9}{'p90':>9}{'skill':>7}"
    table = [f"{head}{'tau':>7}{'false alarms':>15}{'called':>9}  missed"]
    for score in report.scores:
        tau = f"{score.order.tau:7.2f}" if score.order else " " * 7
        memory = score.alarms
        pairs = ((score.fitted, 9, 8), (score.plain, 10, 8), (score.guessed, 9, 9))
        shown = "".join(f"{errors.median:{wide}.1%}{errors.p90:{next_}.1%}" for errors, wide, next_ in pairs)
        ran = f"{memory.false_alarms} of {memory.ran}" if memory.ran else ""
        failed = f"{memory.called} of {memory.failed}" if memory.failed else ""
        missed = " ".join(score.missed()) if score.judged else f"not judged: one case {score.apart:.1f} times apart"
        table.append(f"{score.source:22}{score.rows:5}{shown}{score.skill:7.1f}{tau}{ran:>15}{failed:>9}  {missed}")
    overall = report.overall()
    table += [
        f"{overall['rows']} rows that are judged: median {overall['median']:.1%}, p90 {overall['p90']:.1%}, "
        f"tau {overall['tau']:.2f}",
        f"every row, {overall['every_rows']}: median {overall['every_median']:.1%}, p90 {overall['every_p90']:.1%}, "
        f"tau {overall['every_tau']:.2f}",
        f"the middle source: median {overall['median_of_sources']:.1%}",
        f"out of memory: {overall['false_alarms']:.1%} false alarms, {overall['called']:.0%} called",
        f"skill: {overall['skilled']} of {overall['hard']} sources whose guess is over {GUESS:.0%} off",
        f"every bar: {overall['passing']} of {overall['sources']} sources",
        "launch factors from sources that are no kin of the one they are used on",
        "",
        "not covered:",
    ]
    return table + [f"{count:6}  {reason}" for reason, count in report.counted_reasons().most_common()]
