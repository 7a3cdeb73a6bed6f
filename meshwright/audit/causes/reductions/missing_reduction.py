"""The cause `missing_reduction`: ranks that should have equal copies of a gradient have different ones, which add up to
the right one, or whose mean is right."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.audit.causes.copies import Copies, gradient_copies
from meshwright.audit.causes.counts import valid_targets_of
from meshwright.audit.causes.samples import ranks_by_samples
from meshwright.audit.causes.wording import list_names, list_ranks, list_rows, may_follow, number
from meshwright.audit.evidence import SLACK, Evidence, Verdict, misfit

_PARTLY = 2.0  # the residual if other gradients differ, too, which may follow from this


@dataclass(frozen=True)
class _Rule:
    """How copies are combined to the right gradient: their sum divided by `divisor`, or their mean by targets."""

    text: str
    divisor: float = 1.0
    by_targets: bool = False


@dataclass(frozen=True)
class _Found:
    """A gradient that is not reduced. `rows` are those in which copies differ; empty if that is all of it."""

    name: str
    groups: tuple[tuple[int, ...], ...]
    rule: _Rule
    rows: tuple[int, ...]
    residual: float
    factor: float


def missing_reduction(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if the copies of gradients differ between ranks, and combined by one rule they are the
    reference's. Gradients of which there are no copies may follow: if they differ as well, the verdict is partial, and
    only given if a gradient that is explained was computed before them."""
    found = [result for name in evidence.differing_gradients if (result := _examine(evidence, name)) is not None]
    if not found:
        return None
    first = found[-1]
    same = [one for one in found if one.rule.text == first.rule.text and one.groups == first.groups]
    explained = {one.name for one in found}
    others = [name for name in evidence.differing_gradients if name not in explained]
    if others and evidence.differing_gradients[-1] not in explained:
        return None
    worst = max(one.residual for one in found)
    also = may_follow(others)
    return Verdict(
        "missing_reduction",
        _sentence(evidence, same, first) + also,
        max(worst / SLACK, _PARTLY if others else 0.0),
    )


def _examine(evidence: Evidence, name: str) -> _Found | None:
    expected = evidence.expected(name)
    copies = gradient_copies(evidence, name)
    differing = [region for region in copies if region.differ]
    if expected is None or not differing:
        return None
    groups = tuple(group.ranks for group in differing[0].groups)
    for rule in _rules(evidence, len(groups)):
        results = [_combine(evidence, name, region, expected, rule) for region in copies]
        if all(result is not None for result in results):
            known = [result for result in results if result is not None]
            rows = tuple(sorted({row for result in known for row in result[1]}))
            factor = _share_of_first(differing[0], expected)
            return _Found(name, groups, rule, rows, max(result[0] for result in known), factor)
    return None


def _rules(evidence: Evidence, copies: int) -> list[_Rule]:
    divisors = {copies: "mean", **{value: f"sum divided by {value}" for value in range(2, copies)}}
    rules = [_Rule("sum"), *(_Rule(text, divisor) for divisor, text in divisors.items())]
    return [*rules, _Rule("mean weighted by valid targets", by_targets=True)]


def _combine(
    evidence: Evidence, name: str, copies: Copies, expected: Tensor, rule: _Rule
) -> tuple[float, set[int]] | None:
    """The misfit of the combined copies, and the rows in which copies differ if that is not all of them. Rows that are
    equal on all ranks are right as they are. None if the rule does not fit."""
    right = copies.region.of(expected)
    allowed = copies.region.of(evidence.allowed_error(name, expected))
    values = [group.value.reshape(right.shape) for group in copies.groups]
    if len(values) == 1:
        residual = misfit(values[0], right, allowed)
        return (residual, set()) if evidence.fits(residual) else None
    weights = _weights(evidence, copies, rule)
    if weights is None:
        return None
    combined = sum((weight * value for weight, value in zip(weights, values, strict=True)), torch.zeros_like(right))
    largest = sum(weight * float(value.abs().max()) for weight, value in zip(weights, values, strict=True))
    growth = max(1.0, largest / (float(right.abs().max()) or math.inf))
    residual = misfit(combined, right, allowed * growth)
    if evidence.fits(residual):
        return residual, set()
    spread = torch.stack(values).amax(0) - torch.stack(values).amin(0)
    apart = (spread > SLACK * allowed).reshape(right.shape)
    rows = apart if apart.dim() < 2 else apart.reshape(len(apart), -1).any(1).reshape(-1, *[1] * (apart.dim() - 1))
    residual = misfit(torch.where(rows, combined, values[0]), right, allowed * growth)
    if not evidence.fits(residual):
        return None
    start = copies.region.box[0][0] if copies.region.box else 0
    return residual, {start + int(row) for row in rows.reshape(-1).nonzero().reshape(-1)}


def _weights(evidence: Evidence, copies: Copies, rule: _Rule) -> list[float] | None:
    if not rule.by_targets:
        return [1 / rule.divisor] * len(copies.groups)
    valid = [valid_targets_of(evidence.candidate, evidence.step, group.ranks[0]) for group in copies.groups]
    return [count / sum(valid) for count in valid] if sum(valid) and len(set(valid)) > 1 else None


def _share_of_first(copies: Copies, expected: Tensor) -> float:
    right = copies.region.of(expected).reshape(-1)
    square = float(right.square().sum())
    return float((copies.groups[0].value.reshape(-1) * right).sum()) / square if square else math.nan


# ---- the sentence


def _sentence(evidence: Evidence, found: list[_Found], first: _Found) -> str:
    names = [one.name for one in found]
    rows = f" ({list_rows(first.rows)})" if first.rows else ""
    holders = ", and ".join(list_ranks(group) for group in first.groups[:4])
    more = f", and {len(first.groups) - 4} other groups" if len(first.groups) > 4 else ""
    ranks = sorted(rank for group in first.groups for rank in group)
    over = list_ranks(ranks) if len(ranks) == len(first.groups) else "one rank of each of these groups"
    subject, are, it = ("gradients", "have", "they are") if len(names) > 1 else ("gradient", "has", "it is")
    known = math.isfinite(first.factor)
    share = f" (along it, the copy of {list_ranks(first.groups[0])} is {number(first.factor)} of it)" if known else ""
    return (
        f"the {subject} of {list_names(names)}{rows} {are} different copies on {holders}{more}; their"
        f" {first.rule.text} is the reference's{share}. So {it} not reduced over {over}"
        f"{_reason(evidence, first)}"
    )


def _reason(evidence: Evidence, found: _Found) -> str:
    """What kind of group the ranks are, from their samples."""
    group_of = {
        rank: index for index, ranks in enumerate(ranks_by_samples(evidence.candidate, evidence.step)) for rank in ranks
    }
    firsts = [group_of.get(ranks[0]) for ranks in found.groups]
    if None in firsts:
        return ""
    if len(set(firsts)) == 1:
        return (
            ". These ranks have the same samples: they are a tensor or sequence group, over which the gradients of"
            " parameters that every rank holds must be summed"
        )
    if len(set(firsts)) == len(firsts):
        return ". These ranks have different samples: they are data ranks"
    return ""
