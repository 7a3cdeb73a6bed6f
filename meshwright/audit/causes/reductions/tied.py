"""The cause `tied_on_one_side`: two parameters are one in one training and two in the other."""

from collections.abc import Iterator

from torch import Tensor

from meshwright.audit.causes.wording import number
from meshwright.audit.evidence import SLACK, Evidence, Verdict
from meshwright.audit.recorded_run import RecordedRun


def tied_on_one_side(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if the gradients of the two parameters, where they are two, add up to that of the one."""
    differing = set(evidence.differing_gradients)
    reference, candidate = tied_pairs(evidence.reference), tied_pairs(evidence.candidate)
    for name, first in sorted(reference ^ candidate):
        if not {name, first} & differing:
            continue
        in_reference = (name, first) in reference
        one = evidence.expected(first) if in_reference else evidence.recorded(first)
        two = [evidence.recorded(key) if in_reference else evidence.expected(key) for key in (first, name)]
        residual = _misfit(evidence, first, one, two)
        if residual is None or not evidence.fits(residual):
            continue
        tied, untied = ("reference", "candidate") if in_reference else ("candidate", "reference")
        others = differing - {name, first}
        also = f"; {len(others)} other gradients differ, too" if others else ""
        return Verdict(
            "tied_on_one_side",
            f"{first} and {name} are one tensor in the {tied} and two in the {untied}, where their gradients (largest"
            f" values {_largest(two[0])} and {_largest(two[1])}) add up to the gradient of the one"
            f" ({_largest(one)}): the tie was lost or made by the division, and gradients must be summed{also}",
            residual / SLACK if not others else 2.0,
        )
    return None


def tied_pairs(run: RecordedRun) -> set[tuple[str, str]]:
    """Pairs of a name and the earlier name of the same parameter, where one rank holds both."""
    return set(_pairs(run))


def tied_names(evidence: Evidence) -> set[str]:
    """All names of parameters that are tied in one of the trainings."""
    return {name for run in (evidence.reference, evidence.candidate) for pair in _pairs(run) for name in pair}


def _pairs(run: RecordedRun) -> Iterator[tuple[str, str]]:
    for rank in run.ranks:
        entries = rank.header["parameters"]
        for own_name, entry in entries.items():
            first = entry["same_as"]
            if first in entries:
                yield entry.get("reference_name") or own_name, entries[first].get("reference_name") or first


def _misfit(evidence: Evidence, name: str, one: Tensor | None, two: list[Tensor | None]) -> float | None:
    if one is None or any(value is None or value.shape != one.shape for value in two):
        return None
    first, second = (value for value in two if value is not None)
    largest = float(one.abs().max()) or 1.0
    growth = max(1.0, float(first.abs().max() + second.abs().max()) / largest)
    if evidence.fits(evidence.misfit(name, first, one)):
        return None  # each has the whole gradient, as pipeline stages that hold copies should
    return evidence.misfit(name, first + second, one, growth)


def _largest(value: Tensor | None) -> str:
    return "none" if value is None else number(float(value.abs().max()))
