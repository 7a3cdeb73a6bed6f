"""The cause `clipped_differently`: gradients before clipping are equal, and then they are clipped by other norms on
some ranks, to another limit, only in part, or on one side only."""

from dataclasses import dataclass

import torch

from meshwright.audit.causes.clipping.norm_of_part import gradient_squares, norm_events
from meshwright.audit.causes.wording import list_names, list_ranks, number
from meshwright.audit.evidence import SLACK, Evidence, Verdict
from meshwright.audit.recorded_run import Event, RecordedRun

_EPSILON = 1e-6  # torch adds it to the norm
_CLOSE = 2e-3  # factors that differ by less are the same up to rounding


@dataclass(frozen=True)
class _Clipped:
    """By which factor each rank multiplied each of its gradients between the norm and the optimizer step."""

    factors: dict[tuple[int, str], float]

    def of_rank(self, rank: int) -> list[float]:
        return [factor for (own, _), factor in self.factors.items() if own == rank]


def clipped_differently(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if the ranks' factors of clipping show it, or if gradients differ by the factor with which one
    side clips, while the other side has computed no norm."""
    if evidence.differing_gradients:
        return _on_one_side(evidence)
    if evidence.difference.what not in ("norm", "clipped gradient", "weight"):
        return None
    runs = {"the reference": evidence.reference, "the candidate": evidence.candidate}
    limits = {who: _limits(run.events("norm", evidence.step)) for who, run in runs.items()}
    if limits["the reference"] and limits["the candidate"] and limits["the reference"] != limits["the candidate"]:
        listed = (", ".join(map(number, sorted(values))) for values in limits.values())
        return Verdict("clipped_differently", "the reference clips to {}, the candidate to {}".format(*listed))
    return _by_rank(evidence)


def _on_one_side(evidence: Evidence) -> Verdict | None:
    names = evidence.differing_gradients
    common = evidence.common_factor(names)
    norms = [norm_events(run, evidence.step) for run in (evidence.reference, evidence.candidate)]
    if common is None or bool(norms[0]) == bool(norms[1]):
        return None
    event = next(iter((norms[0] or norms[1]).values()))
    if event["limit"] is None:
        return None
    multiplied = min(1.0, float(event["limit"]) / (float(event["value"]) + _EPSILON))
    factor = 1 / multiplied if norms[0] else multiplied
    worst = max(evidence.scaled_misfit(name, common[0]) for name in names)
    if abs(common[0] / factor - 1) > max(1e-4, common[1]) or not evidence.fits(worst):
        return None
    who, other = ("the reference", "the candidate") if norms[0] else ("the candidate", "the reference")
    return Verdict(
        "clipped_differently",
        f"{who} clips its gradients, of norm {number(event['value'])}, to {number(event['limit'])}; {other} does not"
        f" clip: all gradients that differ are {number(common[0])} times the reference's",
        worst / SLACK,
    )


def _limits(events: list[Event]) -> set[float]:
    return {float(event["limit"]) for event in events if event["limit"] is not None}


def _by_rank(evidence: Evidence) -> Verdict | None:
    events, clipped = norm_events(evidence.candidate, evidence.step), _factors(evidence.candidate, evidence.step)
    norm = gradient_squares(evidence, evidence.candidate).norm
    values = {rank: float(event["value"]) for rank, event in events.items()}
    if not values or any(event["partial"] for event in events.values()):
        return None
    if max(values.values()) > min(values.values()) * (1 + _CLOSE):
        listed = ", ".join(f"{number(value)} on rank {rank}" for rank, value in list(values.items())[:6])
        made = [factor for rank in values for factor in clipped.of_rank(rank)]
        by = f", and multiply their gradients by {number(min(made))} to {number(max(made))}" if made else ""
        return Verdict(
            "clipped_differently",
            f"ranks clip by different norms: {listed}{by}. The norm of all gradients is {number(norm)}: each rank"
            " computes the norm of its own gradients, before they are reduced or of a part",
        )
    return _not_by_its_norm(events, clipped)


def _not_by_its_norm(events: dict[int, Event], clipped: _Clipped) -> Verdict | None:
    """Returns a verdict if gradients were not multiplied by what their norm and limit give."""
    wrong: dict[tuple[int, str], tuple[float, float]] = {}
    for (rank, name), factor in clipped.factors.items():
        event = events.get(rank)
        if event is None or event["limit"] is None:
            continue
        right = min(1.0, float(event["limit"]) / (float(event["value"]) + _EPSILON))
        if abs(factor / right - 1) > _CLOSE:
            wrong[rank, name] = factor, right
    if not wrong:
        return None
    factor, right = next(iter(wrong.values()))
    names = dict.fromkeys(name for _, name in wrong)
    return Verdict(
        "clipped_differently",
        f"the gradients of {list_names(names)} on {list_ranks(rank for rank, _ in wrong)} are multiplied by"
        f" {number(factor)} between the norm and the optimizer step; norm and limit give {number(right)}",
    )


def _factors(run: RecordedRun, step: int) -> _Clipped:
    factors: dict[tuple[int, str], float] = {}
    before, after = run.tensors(step, "unclipped").parts, run.tensors(step, "gradient").parts
    for name, parts in before.items():
        values = {(part.rank, part.region): part.value.to(torch.float64) for part in after.get(name, [])}
        for part in parts:
            value, own = values.get((part.rank, part.region)), part.value.to(torch.float64)
            square = float(own.square().sum())
            if value is not None and square:
                factors[part.rank, name] = float((value * own).sum()) / square
    return _Clipped(factors)
