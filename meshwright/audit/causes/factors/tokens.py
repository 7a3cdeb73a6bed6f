"""The cause `averaged_over_ranks`: the mean over ranks (or micro-batches) of their own means was taken although these
have different numbers of valid targets nᵢ. With their losses ℓᵢ,

    right    Σ nᵢ ℓᵢ / Σ nᵢ
    wrong    Σ ℓᵢ / number of ranks or micro-batches
"""

from dataclasses import dataclass

from meshwright.audit.causes.copies import gradient_copies
from meshwright.audit.causes.counts import microbatches
from meshwright.audit.causes.samples import ranks_by_samples
from meshwright.audit.causes.wording import number
from meshwright.audit.evidence import SLACK, Evidence, Verdict
from meshwright.audit.recorded_run import RecordedRun

_LOSS_ROUNDING = {"torch.bfloat16": 2.0**-8, "torch.float16": 2.0**-11}
_GRADIENTS_NOT_COMPUTED = 1.5  # the residual: any cause whose gradients fit is preferred
_LARGEST = 2.0  # times the change of weights
_SMALLEST_SHARE_OF_NAMES = 0.8  # of all gradients differ: the weights of samples reach every parameter


@dataclass(frozen=True)
class _Share:
    """The loss and the valid targets of one micro-batch of one rank."""

    rank: int
    valid: int
    loss: float


def averaged_over_ranks(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if nearly all gradients differ, one side has shares of different numbers of targets, and the
    other side's loss is the mean over these targets, but not the mean of the shares' means. That the gradients follow
    from this cannot be computed from a record, so an explanation that also computes the gradients is preferred."""
    names = evidence.differing_gradients
    if not names or len(names) < _SMALLEST_SHARE_OF_NAMES * (len(names) + len(evidence.equal_gradients)):
        return None
    if any(copies.differ for name in names for copies in gradient_copies(evidence, name)):
        return None
    for wrong, right, who, other in (
        (evidence.candidate, evidence.reference, "the candidate", "the reference"),
        (evidence.reference, evidence.candidate, "the reference", "the candidate"),
    ):
        verdict = _explain(evidence, wrong, right, who, other)
        if verdict is not None:
            return verdict
    return None


def _explain(evidence: Evidence, wrong: RecordedRun, right: RecordedRun, who: str, other: str) -> Verdict | None:
    shares, right_shares = _shares(wrong, evidence.step), _shares(right, evidence.step)
    if len({share.valid for share in shares}) < 2 or not right_shares:
        return None
    if not may_be_as_large(evidence, [(share.valid, 1 / len(shares)) for share in shares]):
        return None
    tolerance = max(loss_rounding(run, evidence.step) for run in (wrong, right))
    for times in {1, microbatches(wrong, evidence.step)}:
        weighted = times * _weighted(shares)
        plain = times * sum(share.loss for share in shares) / len(shares)
        for expected in _losses(right, right_shares, evidence.step):
            if abs(plain / expected - 1) > SLACK * tolerance >= abs(weighted / expected - 1):
                return Verdict(
                    "averaged_over_ranks",
                    _sentence(shares, who, other, weighted, plain, expected),
                    _GRADIENTS_NOT_COMPUTED,
                )
    return None


def may_be_as_large(evidence: Evidence, shares: list[tuple[int, float]]) -> bool:
    """Whether the gradients differ by as much as other weights of the shares may change them, which are given with
    their valid targets. The mean over few targets is longer than that over many, by the root of their ratio."""
    total = sum(valid for valid, _ in shares)
    off = sum(abs(weight - valid / total) * (total / valid) ** 0.5 for valid, weight in shares)
    changed = squares = 0.0
    for name in evidence.differing_gradients:
        right, own = evidence.expected(name), evidence.recorded(name)
        if right is not None and own is not None and own.shape == right.shape:
            changed += float((own - right).square().sum())
            squares += float(right.square().sum())
    return bool(squares) and 0.01 * off <= (changed / squares) ** 0.5 <= _LARGEST * off


def _sentence(shares: list[_Share], who: str, other: str, weighted: float, plain: float, expected: float) -> str:
    of_ranks = len({share.rank for share in shares}) > 1
    what = "ranks" if of_ranks else "micro-batches"
    counts: dict[int, int] = {}
    for index, share in enumerate(shares):
        key = share.rank if of_ranks else index
        counts[key] = counts.get(key, 0) + share.valid
    listed = ", ".join(str(count) for count in list(counts.values())[:8])
    return (
        f"{who}'s {what} have {listed} valid targets. Their losses weighted by these numbers give {number(weighted)},"
        f" which is the loss of {other} ({number(expected)}); the mean of their means is {number(plain)}. So {who}"
        f" averages over {what} and not over targets: each loss must be divided by the targets of all {what}"
    )


def _shares(run: RecordedRun, step: int) -> list[_Share]:
    """The losses of a step with their numbers of targets, in pairs; ranks with the same samples count once."""
    groups = ranks_by_samples(run, step)
    ranks = [group[0] for group in groups] or [rank.rank for rank in run.ranks]
    shares: list[_Share] = []
    for rank in ranks:
        losses = [event for event in run.events("loss", step) if event.rank == rank]
        targets = [event for event in run.events("targets", step) if event.rank == rank]
        if len(losses) != len(targets):
            return []
        shares += [
            _Share(rank, int(target["valid"]), float(loss["value"]))
            for loss, target in zip(losses, targets, strict=True)
        ]
    return [share for share in shares if share.valid]


def _weighted(shares: list[_Share]) -> float:
    return sum(share.valid * share.loss for share in shares) / sum(share.valid for share in shares)


def _losses(run: RecordedRun, shares: list[_Share], step: int) -> list[float]:
    """What the loss over all targets may be, from the losses that backward was called on."""
    summed = sum(share.loss for share in shares) / len({share.rank for share in shares})
    return [value for value in (_weighted(shares), summed) if value]


def loss_rounding(run: RecordedRun, step: int) -> float:
    return max((_LOSS_ROUNDING.get(event["dtype"], 2.0**-20) for event in run.events("loss", step)), default=2.0**-20)
