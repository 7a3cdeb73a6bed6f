"""All cases predicted, fitted and scored, per source; and every row that is not.

A case is predicted three times: without any factor, with the one that `fit` reads off other sources, and by the guess
of validation/runs/baseline.py (`alike`), which also goes without the source it is judged on. `skill` is the guess's
median error over ours. A source whose own repetitions of a case lie so far apart that no prediction could be near both
of them is shown and not judged: it is in no total but those of every row, and of memory. A short run takes every n-th
row of a source, at most `MOST`, and `FEW` where nearly every row has a model of its own to trace (`LONG`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from meshwright.errors import MeshwrightError
from validation.predictions.fit import Factors, fit
from validation.predictions.predict import Predicted, Profiles, fits, predict_case, traced
from validation.predictions.score import Alarms, Errors, Order, alarms, apart, errors_of, order_of
from validation.runs.baseline import guess, points
from validation.runs.case import Case
from validation.runs.cover import Coverage, cover

LONG = ("ryujaehun_cnn", "llm_foundry", "bigscience_a100")
SLOW = "densenet"  # a minute to trace
MOST, FEW = 60, 12
MEDIAN, P90, TAU, FALSE_ALARMS = 0.10, 0.25, 0.8, 0.05  # what is asked of every source
APART = (1 + P90) / (1 - P90)  # two steps of one case further apart are not both within P90 of any prediction
GUESS, SKILL = 0.15, 2.0  # where the guess is further off than this, to be so many times better
Progress = Callable[[str], None]


@dataclass(frozen=True)
class SourceScore:
    """`fitted` is ours, `plain` ours without any factor, `guessed` the constant rate's; `apart` is how far the source's
    own repetitions of a case are from each other."""

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
        return self.apart <= APART

    @property
    def skill(self) -> float:
        return self.guessed.median / max(self.fitted.median, 1e-9)

    def missed(self) -> tuple[str, ...]:
        """The bars it does not reach; one that asks for what the source does not have is none."""
        found = {
            "median": self.fitted.median > MEDIAN,
            "p90": self.fitted.p90 > P90,
            "skill": self.guessed.median > GUESS and self.skill < SKILL,
            "tau": self.order is not None and self.order.tau < TAU,
            "alarms": self.alarms.false_alarms > FALSE_ALARMS * self.alarms.ran,
            "calls": self.alarms.called < self.alarms.failed,
        }
        return tuple(name for name, is_missed in found.items() if is_missed)


@dataclass(frozen=True)
class Report:
    """`reasons` by row: why it was not predicted. `factors` by source."""

    scores: tuple[SourceScore, ...]
    predicted: tuple[Predicted, ...]
    factors: dict[str, Factors]
    reasons: dict[str, str]

    def overall(self) -> dict[str, float]:
        """Of the sources that are judged: all rows together, the middle source, the order of plans. Of every source:
        errors and order again (`every_`), false alarms and calls."""
        judged = [score for score in self.scores if score.judged]
        errors, tau = self._errors_and_tau(judged)
        every, every_tau = self._errors_and_tau(self.scores)
        told = [score.alarms for score in self.scores]
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
            "false_alarms": sum(one.false_alarms for one in told) / max(1, sum(one.ran for one in told)),
            "called": sum(one.called for one in told) / max(1, sum(one.failed for one in told)),
        }

    def _errors_and_tau(self, scores: Sequence[SourceScore]) -> tuple[Errors, float]:
        sources = {score.source for score in scores}
        of_them = [one for one in self.predicted if one.case.source in sources]
        orders = [score.order for score in scores if score.order is not None]
        tau = sum(order.tau * order.pairs for order in orders) / max(1, sum(order.pairs for order in orders))
        return errors_of([one.case for one in of_them], {one.case.id: one.step_s for one in of_them}), tau

    def counted_reasons(self) -> Counter[str]:
        return Counter(f"{row.rpartition('-')[0]}: {reason}" for row, reason in self.reasons.items())


def report(
    everything: bool = False,
    coverage: Coverage | None = None,
    profiles: Profiles = traced,
    progress: Progress = lambda _: None,
) -> Report:
    found = coverage or cover()
    reasons = dict(found.reasons)
    chosen = _chosen(found.cases, everything, reasons)
    plain: list[Predicted] = []
    holds: dict[str, bool] = {}
    for number, case in enumerate(chosen):
        progress(f"{number + 1} of {len(chosen)}: {case.id}")
        try:
            if case.step_s is not None:
                plain.append(predict_case(case, profiles))
            if _tells_memory(case):
                holds[case.id] = fits(case, profiles)
        except MeshwrightError as error:
            reasons[case.id] = str(error)
    factors = fit(plain)
    fitted = tuple(predict_case(one.case, profiles, factors[one.case.source].launch) for one in plain)
    return Report(tuple(_scores(found.cases, chosen, plain, fitted, holds)), fitted, factors, reasons)


def _chosen(cases: Sequence[Case], everything: bool, reasons: dict[str, str]) -> list[Case]:
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


def _tells_memory(case: Case) -> bool:
    """Whether it ran is known of all; what it needed, only where its recomputation is stated and a plan can say it."""
    return case.sample.kind == "tokens" and not any("recompu" in default for default in case.defaults)


def _scores(
    everything: Sequence[Case],
    cases: Sequence[Case],
    plain: Sequence[Predicted],
    fitted: Sequence[Predicted],
    holds: dict[str, bool],
) -> list[SourceScore]:
    known = points([one.case for one in plain])
    seconds = [
        {one.case.id: one.step_s for one in fitted},
        {one.case.id: one.step_s for one in plain},
        guess(known, "alike"),
    ]
    made = []
    for source in dict.fromkeys(one.case.source for one in plain):
        timed = [one.case for one in plain if one.case.source == source]
        ours, plainly, guessed = (errors_of(timed, predicted) for predicted in seconds)
        called = alarms([case for case in cases if case.source == source], holds)
        order = order_of(timed, seconds[0])
        itself = apart(case for case in everything if case.source == source)
        made.append(SourceScore(source, len(timed), ours, plainly, guessed, order, called, itself))
    return made


def as_json(made: Report) -> dict[str, Any]:
    """`rows` by case, `summary` by source, `reasons` counted."""
    rows = [
        {
            "id": one.case.id,
            "measured_s": one.case.step_s,
            "predicted_s": one.step_s,
            "breakdown": one.breakdown,
            "factors": asdict(made.factors[one.case.source]),
            "defaults": one.case.defaults,
        }
        for one in made.predicted
    ]
    summary = {
        score.source: {**asdict(score), "skill": score.skill, "judged": score.judged, "missed": score.missed()}
        for score in made.scores
    }
    return {"rows": rows, "summary": {"all": made.overall(), **summary}, "not_covered": dict(made.counted_reasons())}


def lines(made: Report) -> list[str]:
    head = f"{'source':22}{'rows':>5}{'ours':>9}{'p90':>8}{'unfitted':>10}{'p90':>8}{'guess':>9}{'p90':>9}{'skill':>7}"
    found = [f"{head}{'tau':>7}{'false alarms':>15}{'called':>9}  missed"]
    for score in made.scores:
        tau = f"{score.order.tau:7.2f}" if score.order else " " * 7
        told = score.alarms
        pairs = ((score.fitted, 9, 8), (score.plain, 10, 8), (score.guessed, 9, 9))
        shown = "".join(f"{errors.median:{wide}.1%}{errors.p90:{next_}.1%}" for errors, wide, next_ in pairs)
        ran = f"{told.false_alarms} of {told.ran}" if told.ran else ""
        failed = f"{told.called} of {told.failed}" if told.failed else ""
        missed = " ".join(score.missed()) if score.judged else f"not judged: one case {score.apart:.1f} times apart"
        found.append(f"{score.source:22}{score.rows:5}{shown}{score.skill:7.1f}{tau}{ran:>15}{failed:>9}  {missed}")
    whole = made.overall()
    found += [
        f"{whole['rows']} rows that are judged: median {whole['median']:.1%}, p90 {whole['p90']:.1%}, "
        f"tau {whole['tau']:.2f}",
        f"every row, {whole['every_rows']}: median {whole['every_median']:.1%}, p90 {whole['every_p90']:.1%}, "
        f"tau {whole['every_tau']:.2f}",
        f"the middle source: median {whole['median_of_sources']:.1%}",
        f"out of memory: {whole['false_alarms']:.1%} false alarms, {whole['called']:.0%} called",
        f"skill: {whole['skilled']} of {whole['hard']} sources whose guess is over {GUESS:.0%} off",
        f"every bar: {whole['passing']} of {whole['sources']} sources",
        "the host's pace from sources that are no kin of the one it is used on",
        "",
        "not covered:",
    ]
    return found + [f"{count:6}  {reason}" for reason, count in made.counted_reasons().most_common()]
