"""`Evidence`: what the causes of `causes/` look at to explain the first difference between two recorded trainings."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from meshwright.audit.recorded_run import RecordedRun
from meshwright.audit.recorder.whole import WrittenPart

SLACK = 4.0  # times what rounding explains, because a hypothesis adds up in another order than either training
MOST_ROWS = 10  # that a difference lists
_ASSUMED_ROUNDING = 1e-5  # of a tensor's largest element, where nothing else is known

Compared = Literal["start", "gradient", "norm", "clipped gradient", "buffer", "weight"]


@dataclass(frozen=True)
class Difference:
    """A value that differs by more than rounding explains. `error` is the largest error of an element relative to its
    row, `allowed` the largest that rounding explains. `ranks` are the candidate's ranks whose values differ, and `rows`
    the first of the rows along the first dimension. `error` is infinite where a side has no value. `share` is the norm
    of all errors relative to that of the reference's tensor."""

    step: int
    what: Compared
    name: str | None
    error: float
    allowed: float
    ranks: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    share: float = math.inf


def distinct(differences: Sequence[Difference]) -> list[Difference]:
    """Those that are at least a hundredth as far beyond rounding as the largest. Where gradients are only seen after
    clipping, one wrong gradient changes all others a little."""
    ratios = [min(1e6, each.error / each.allowed if each.allowed else math.inf) for each in differences]
    least = max(ratios, default=0.0) / 100
    return [each for each, ratio in zip(differences, ratios, strict=True) if ratio >= least]


@dataclass(frozen=True)
class Verdict:
    """A cause that explains the difference: its name, a sentence with the numbers, and the error that it leaves
    unexplained, relative to what rounding explains (at most 1 if the explanation is complete)."""

    cause: str
    explanation: str
    residual: float = 0.0


@dataclass(frozen=True)
class Explained:
    """The cause of the first difference, `unknown` if none fits, and the names of the causes that were ruled out."""

    cause: str
    explanation: str
    ruled_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Projection:
    """The candidate's gradient c, all parts of all ranks, projected on the reference's gradient r: `product` is <c, r>,
    `square` is <r, r>, and `moved` is how far rounding may move the product."""

    product: float
    square: float
    moved: float
    elements: int

    @property
    def factor(self) -> float:
        return self.product / self.square if self.square else math.nan


@dataclass(frozen=True)
class Evidence:
    """The first difference, and both records.

    `differences` are all differences of the same step, in the order in which a step computes them, by what was
    compared. `allowed` holds, by name, how far each element of the gradient before clipping may differ by rounding (a
    number or a tensor of the shape of the whole). The candidate's gradients are taken divided by `divided_by`."""

    reference: RecordedRun
    candidate: RecordedRun
    difference: Difference
    differences: Mapping[str, tuple[Difference, ...]]
    allowed: Mapping[str, Tensor] = field(default_factory=dict)
    divided_by: float = 1.0

    @property
    def step(self) -> int:
        return max(1, self.difference.step)

    # ---- gradients before clipping

    def gradient_kind(self, run: RecordedRun) -> str:
        """The kind of tensors that holds a run's gradients before clipping: `unclipped` if the script clips."""
        own, theirs = self.reference.gradient_kinds(self.candidate, self.step)
        return own if run is self.reference else theirs

    def expected(self, name: str) -> Tensor | None:
        """The reference's gradient before clipping, in fp64."""
        return _wide(self.reference.whole(self.step, self.gradient_kind(self.reference), name))

    def recorded(self, name: str, rank: int | None = None) -> Tensor | None:
        """The candidate's gradient before clipping, in fp64; with `rank`, as that rank has the parts that it holds."""
        whole = _wide(self.candidate.whole(self.step, self.gradient_kind(self.candidate), name, rank))
        return whole if whole is None or self.divided_by == 1 else whole / self.divided_by

    def recorded_parts(self, name: str) -> list[WrittenPart]:
        """The candidate's gradient before clipping, as each rank wrote its parts."""
        parts = self.candidate.parts(self.step, self.gradient_kind(self.candidate), name)
        if self.divided_by == 1:
            return parts
        return [replace(part, value=part.value.to(torch.float64) / self.divided_by) for part in parts]

    @cached_property
    def differing_gradients(self) -> tuple[str, ...]:
        """The parameters whose gradient before clipping differs, in the order of the model."""
        names = {difference.name for difference in self.differences.get("gradient", ()) if difference.name}
        ordered = [name for name in self.parameter_order if name in names]
        return (*ordered, *sorted(names - set(ordered)))

    @cached_property
    def parameter_order(self) -> tuple[str, ...]:
        """All names of parameters, in the order of the reference's model."""
        return tuple(dict.fromkeys([*self.reference.parameters, *self.candidate.parameters]))

    @property
    def equal_gradients(self) -> tuple[str, ...]:
        """The parameters that have a gradient on both sides, which does not differ."""
        differing = set(self.differing_gradients)
        reference = self.reference.tensors(self.step, self.gradient_kind(self.reference)).parts
        candidate = self.candidate.tensors(self.step, self.gradient_kind(self.candidate)).parts
        return tuple(
            name for name in self.parameter_order if name in reference and name in candidate and name not in differing
        )

    # ---- how well a hypothesis fits

    def allowed_error(self, name: str, expected: Tensor) -> Tensor:
        """How far each element of a gradient may differ by rounding, in the shape of the whole."""
        allowed = self.allowed.get(name)
        if allowed is None:
            largest = float(expected.abs().max()) if expected.numel() else 0.0
            return torch.full_like(expected, _ASSUMED_ROUNDING * (largest or 1.0))
        return torch.as_tensor(allowed).to(torch.float64).expand(expected.shape)

    def misfit(self, name: str, value: Tensor, expected: Tensor, growth: float = 1.0) -> float:
        """How far a value is from an expected one, relative to what rounding explains: at most 1 if they are equal.
        `growth` is how much larger the terms are that were added up than those of the gradient itself."""
        return misfit(value, expected, self.allowed_error(name, expected) * growth)

    def fits(self, value: float) -> bool:
        """Whether a misfit is small enough to be due to rounding."""
        return value <= SLACK

    def projection(self, name: str) -> Projection | None:
        """The candidate's gradient projected on the reference's; None if a side has none."""
        if name not in self._projections:
            self._projections[name] = self._project(name)
        return self._projections[name]

    @cached_property
    def _projections(self) -> dict[str, Projection | None]:
        return {}

    def _project(self, name: str) -> Projection | None:
        expected, parts = self.expected(name), self.recorded_parts(name)
        if expected is None or not parts:
            return None
        allowed = self.allowed_error(name, expected)
        product = square = moved = 0.0
        elements = 0
        for part in parts:
            value, right = part.value.to(torch.float64).reshape(-1), part.region.of(expected).reshape(-1)
            if value.shape != right.shape or not bool(value.isfinite().all()):
                return None
            product += float((value * right).sum())
            square += float(right.square().sum())
            moved += float((right.abs() * part.region.of(allowed).reshape(-1)).sum())
            elements += value.numel()
        return Projection(product, square, moved, elements)

    def common_factor(self, names: Iterable[str]) -> tuple[float, float] | None:
        """The factor by which the gradients of all these parameters are those of the reference, by least squares, and
        its uncertainty relative to itself. None if there is none, because a single number is always a multiple."""
        projections = [self.projection(name) for name in names]
        known = [projection for projection in projections if projection is not None]
        square = sum(projection.square for projection in known)
        if not known or len(known) < len(projections) or not square or sum(p.elements for p in known) < 2:
            return None
        factor = sum(projection.product for projection in known) / square
        if not factor or not math.isfinite(factor):
            return None
        return factor, min(0.02, max(1e-6, sum(projection.moved for projection in known) / square))

    def unexplained(self, name: str, predicted: Tensor, growth: float = 1.0) -> float:
        """How far the candidate's parts of a gradient are from those that a hypothesis predicts, relative to rounding.
        It does not fit, either, if it leaves more than half of the difference from the reference's gradient."""
        expected, parts = self.expected(name), self.recorded_parts(name)
        if expected is None or not parts:
            return math.inf
        allowed = self.allowed_error(name, expected) * growth
        worst = left = was = 0.0
        for part in parts:
            value = part.value.to(torch.float64)
            hypothesis, right = (part.region.of(tensor).reshape(value.shape) for tensor in (predicted, expected))
            worst = max(worst, misfit(value, hypothesis, part.region.of(allowed)))
            left += float((value - hypothesis).square().sum())
            was += float((value - right).square().sum())
        return worst if left <= was / 4 else max(worst, 2 * SLACK)

    def scaled_misfit(self, name: str, factor: float) -> float:
        """As `unexplained`, of the hypothesis that the gradient is the reference's times a factor."""
        expected = self.expected(name)
        return math.inf if expected is None else self.unexplained(name, factor * expected, abs(factor))


def misfit(value: Tensor, expected: Tensor, allowed: Tensor) -> float:
    """The largest error of an element relative to what is allowed there. Infinite if some element is not finite."""
    if value.numel() != expected.numel():
        return math.inf
    if not value.numel():
        return 0.0
    error = (value.to(torch.float64).reshape(-1) - expected.to(torch.float64).reshape(-1)).abs()
    largest = float((error / allowed.to(torch.float64).reshape(-1).clamp(min=1e-300)).max())
    return largest if math.isfinite(largest) else math.inf


def _wide(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.to(torch.float64)
