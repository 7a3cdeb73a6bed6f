"""The cause `norm_of_part` where a script clips by hand, so that its norms are not recorded. All gradients on rank r
are f_r times the reference's. If both sides clip to the same norm, the rank's norm is 1 / f_r times the reference's."""

import torch
from torch import Tensor

from meshwright.audit.causes.clipping.norm_of_part import norm_events, rules, squares_of
from meshwright.audit.causes.counts import counts_of, recognize
from meshwright.audit.causes.reductions.tied import tied_names
from meshwright.audit.causes.wording import number
from meshwright.audit.evidence import SLACK, Evidence, Verdict, misfit
from meshwright.audit.recorded_run import Event
from meshwright.audit.recorder.whole import WrittenPart

_LEAST_TOLERANCE, _MOST_TOLERANCE = 2e-6, 5e-3


def norm_not_seen(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if what each rank holds of all gradients is multiplied by one factor, and norms that one rule
    of `norm_of_part` gives have the factors' inverse ratio to the norm of the reference's gradients."""
    if evidence.difference.what not in ("gradient", "clipped gradient") or tied_names(evidence):
        return None
    if norm_events(evidence.candidate, evidence.step):
        return None
    clipped = evidence.difference.what == "clipped gradient"
    kind = "gradient" if clipped else evidence.gradient_kind(evidence.candidate)
    if kind != "gradient":
        return None
    right, parts = _gradients(evidence)
    if not right or any(len(right[name].shape) and not parts[name] for name in right):
        return None
    factors = _factors(evidence, right, parts)
    if factors is None:
        return None
    ratios = {rank: 1 / factor for rank, (factor, _) in factors.items()}
    tolerance = max(_LEAST_TOLERANCE, *(uncertainty for _, uncertainty in factors.values()))
    if tolerance > _MOST_TOLERANCE or all(abs(ratio - 1) <= 2 * tolerance for ratio in ratios.values()):
        return None
    alike = max(ratios.values()) / min(ratios.values()) - 1 <= 2 * tolerance
    if alike and recognize(next(iter(factors.values()))[0], 2 * tolerance, counts_of(evidence)):
        return None
    wholes, held = (run.tensors(evidence.step, "gradient") for run in (evidence.reference, evidence.candidate))
    squares = squares_of(right, wholes, held, {rank: factor for rank, (factor, _) in factors.items()})
    events = {
        rank: Event(rank, "norm", evidence.step, {"value": ratio * squares.norm, "names": []})
        for rank, ratio in ratios.items()
    }
    for residual, text in rules(evidence.candidate, squares, events, 2 * tolerance):
        listed = ", ".join(f"{number(factor)} on rank {rank}" for rank, (factor, _) in list(factors.items())[:6])
        return Verdict(
            "norm_of_part",
            f"all gradients are the reference's times {listed}, as if they were clipped by norms with the inverse"
            f" ratio: by {', '.join(number(event['value']) for event in list(events.values())[:6])} where the norm of"
            f" the reference's gradients is {number(squares.norm)}. {text}",
            residual,
        )
    return None


def _gradients(evidence: Evidence) -> tuple[dict[str, Tensor], dict[str, list[WrittenPart]]]:
    """The reference's gradients as the optimizer gets them, and the candidate's parts."""
    right: dict[str, Tensor] = {}
    parts: dict[str, list[WrittenPart]] = {}
    for name in evidence.reference.tensors(evidence.step, "gradient").parts:
        whole = evidence.reference.whole(evidence.step, "gradient", name)
        if whole is not None:
            right[name] = whole.to(torch.float64)
            parts[name] = evidence.candidate.parts(evidence.step, "gradient", name)
    return right, parts


def _factors(
    evidence: Evidence, right: dict[str, Tensor], parts: dict[str, list[WrittenPart]]
) -> dict[int, tuple[float, float]] | None:
    """Each rank's factor with its uncertainty; None if some part is not the reference's times its rank's factor."""
    products: dict[int, tuple[float, float, float]] = {}
    for name, written in parts.items():
        for part in written:
            own, expected = part.value.double().reshape(-1), part.region.of(right[name]).reshape(-1)
            allowed = part.region.of(evidence.allowed_error(name, right[name])).reshape(-1)
            product, square, moved = products.get(part.rank, (0.0, 0.0, 0.0))
            product += float((own * expected).sum())
            square += float(expected.square().sum())
            moved += float((allowed * expected).square().sum())
            products[part.rank] = product, square, moved
    if not products or any(product <= 0 for product, _, _ in products.values()):
        return None
    factors = {rank: (product / square, moved**0.5 / square) for rank, (product, square, moved) in products.items()}
    for name, written in parts.items():
        for part in written:
            factor = factors[part.rank][0]
            allowed = part.region.of(evidence.allowed_error(name, right[name])) * max(1.0, factor)
            if misfit(part.value, factor * part.region.of(right[name]), allowed) > SLACK:
                return None
    return factors
