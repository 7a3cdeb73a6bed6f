"""The cause `averaged_over_ranks`, from the sums of losses that cross_entropy returned: ranks or micro-batches divide
them by their own numbers of targets. In micro-batch i, rank r calls it K times, for one term of its loss each, and call
k has n targets whose losses add up to S. With N_k = Σ n and M_k = Σ S / N_k, the losses that backward is called on are

    right    L = Σ_k c_k M_k, where c_0 = 1
    wrong    for one k, M_k is replaced by a mean of quotients S / n, as `_wrong_weights` lists them
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from meshwright.audit.causes.copies import gradient_copies
from meshwright.audit.causes.factors.tokens import loss_rounding, may_be_as_large
from meshwright.audit.causes.samples import ranks_by_samples
from meshwright.audit.causes.wording import list_names, number
from meshwright.audit.evidence import SLACK, Evidence, Verdict
from meshwright.audit.recorded_run import RecordedRun

_GRADIENTS_NOT_COMPUTED = 1.5  # the residual: any cause whose gradients fit is preferred
_SMALLEST_SHARE_OF_NAMES = 0.8  # of all gradients differ: the weights of samples reach every parameter
_MOST_TERMS = 2
_SAME_COEFFICIENT = 1e-3  # in two steps of the reference, relative


@dataclass(frozen=True)
class _Call:
    """The valid targets of one call of cross_entropy, and the sum of their losses."""

    rank: int
    microbatch: int
    valid: int
    summed: float


@dataclass(frozen=True)
class _Losses:
    """A step's losses: `total` is what a rank's losses add up to, the mean over ranks. `terms` are the calls of
    cross_entropy by their place before a backward."""

    total: float
    terms: tuple[tuple[_Call, ...], ...]
    ranks: int

    def mean(self, term: int) -> float:
        return sum(call.summed for call in self.terms[term]) / sum(call.valid for call in self.terms[term])


def averaged_over_own_tokens(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if nearly all gradients differ, and the candidate's loss is the reference's with one term
    divided by own numbers of targets. Gradients cannot be computed from this, so others that can are preferred."""
    names = evidence.differing_gradients
    if not names or len(names) < _SMALLEST_SHARE_OF_NAMES * (len(names) + len(evidence.equal_gradients)):
        return None
    if any(copies.differ for name in names for copies in gradient_copies(evidence, name)):
        return None
    right, own = (_losses(run, evidence.step) for run in (evidence.reference, evidence.candidate))
    if right is None or own is None or len(right.terms) != len(own.terms):
        return None
    tolerance = SLACK * max(loss_rounding(run, evidence.step) for run in (evidence.reference, evidence.candidate))
    coefficients = _coefficients(evidence, right, tolerance)
    if coefficients is None:
        return None
    expected = sum(factor * own.mean(term) for term, factor in enumerate(coefficients))
    for times, term in product(dict.fromkeys((1, own.ranks)), range(len(own.terms))):
        for text, weights in _wrong_weights(own, term):
            wrong = expected + coefficients[term] * (_weighted(own.terms[term], weights) - own.mean(term))
            if abs(wrong / expected - 1) <= tolerance or abs(times * own.total / wrong - 1) > tolerance:
                continue
            valid = [(call.valid, weight) for call, weight in zip(own.terms[term], weights, strict=True)]
            if may_be_as_large(evidence, valid):
                sentence = _sentence(own, term, text, expected, wrong)
                return Verdict("averaged_over_ranks", sentence, _GRADIENTS_NOT_COMPUTED)
    return None


def _coefficients(evidence: Evidence, right: _Losses, tolerance: float) -> list[float] | None:
    """The coefficients of the reference's terms. With two terms the second is what is left of the loss, and must be the
    same in the reference's next step."""
    if len(right.terms) == 1:
        return [1.0] if abs(right.total / right.mean(0) - 1) <= tolerance else None
    steps = [right, *filter(None, [_losses(evidence.reference, evidence.step + 1)])]
    seconds = [(step.total - step.mean(0)) / step.mean(1) for step in steps if len(step.terms) == _MOST_TERMS]
    if min(seconds) <= 0 or max(seconds) > min(seconds) * (1 + _SAME_COEFFICIENT):
        return None
    return [1.0, seconds[0]]


def _wrong_weights(losses: _Losses, term: int) -> Iterator[tuple[str, list[float]]]:
    """How the calls' own means may be weighted instead of by their targets: a text, and the weight of each call."""
    calls = losses.terms[term]
    ranks, microbatches = (len({getattr(call, key) for call in calls}) for key in ("rank", "microbatch"))
    if ranks > 1:
        of_rank = [sum(other.valid for other in calls if other.rank == call.rank) for call in calls]
        yield "rank", [call.valid / total / ranks for call, total in zip(calls, of_rank, strict=True)]
    if microbatches > 1:
        yield "micro-batch of each rank" if ranks > 1 else "micro-batch", [1 / len(calls)] * len(calls)
    if ranks > 1 and microbatches > 1:
        alike = [sum(other.valid for other in calls if other.microbatch == call.microbatch) for call in calls]
        yield "micro-batch", [call.valid / total / microbatches for call, total in zip(calls, alike, strict=True)]
    if term:
        first = losses.terms[0]
        yield "rank, weighted by its targets of the first", [call.valid / sum(c.valid for c in first) for call in first]


def _weighted(calls: tuple[_Call, ...], weights: list[float]) -> float:
    return sum(weight * call.summed / call.valid for call, weight in zip(calls, weights, strict=True))


def _sentence(losses: _Losses, term: int, text: str, expected: float, wrong: float) -> str:
    which = "" if len(losses.terms) == 1 else f" in the {('first', 'second')[term]} of two terms"
    counts: dict[int, int] = {}
    of_ranks = losses.ranks > 1
    own = "ranks" if of_ranks else "micro-batches"
    for call in losses.terms[term]:
        key = call.rank if of_ranks else call.microbatch
        counts[key] = counts.get(key, 0) + call.valid
    listed = list_names([str(count) for count in counts.values()], 8)
    return (
        f"the candidate's {own} have {listed} valid targets{which}. The mean loss"
        f" of all of them is {number(expected)}, as the reference has it; the mean of the means of each {text} is"
        f" {number(wrong)}, as the candidate has it. So the candidate averages over {own}"
        " and not over targets: each loss must be divided by the targets of all"
    )


def _losses(run: RecordedRun, step: int) -> _Losses | None:
    """The losses of a step, where ranks with the same samples count once. None if calls of cross_entropy and backward
    do not alternate in the same way everywhere, or a sum was not recorded."""
    ranks = [group[0] for group in ranks_by_samples(run, step)]
    terms: list[list[_Call]] = []
    total = 0.0
    for rank in ranks:
        losses = [event for event in run.events("loss", step) if event.rank == rank]
        targets = [event for event in run.events("targets", step) if event.rank == rank]
        count = len(targets) // len(losses) if losses else 0
        if not 1 <= count <= _MOST_TERMS or count * len(losses) != len(targets) or (terms and len(terms) != count):
            return None
        terms = terms or [[] for _ in range(count)]
        total += sum(float(event["value"]) for event in losses) / len(ranks)
        for index, event in enumerate(targets):
            summed = event.values.get("summed")
            if summed is None or not event["valid"]:
                return None
            terms[index % count].append(_Call(rank, index // count, int(event["valid"]), float(summed)))
    return _Losses(total, tuple(map(tuple, terms)), len(ranks)) if terms and total else None
