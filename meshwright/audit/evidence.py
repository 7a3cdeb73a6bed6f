"""`Evidence`: what the causes of `causes/` look at to explain the first difference between two recorded trainings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from meshwright.audit.recorded_run import RecordedRun

Compared = Literal["start", "loss", "gradient", "norm", "clipped gradient", "buffer", "weight"]


@dataclass(frozen=True)
class Difference:
    """A value that differs by more than rounding explains. `error` is the largest error of an element relative to its
    row, `allowed` the largest that rounding explains. `ranks` are the candidate's ranks whose values differ, and `rows`
    the first of the rows along the first dimension. `error` is infinite where a side has no value."""

    step: int
    what: Compared
    name: str | None
    error: float
    allowed: float
    ranks: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()


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
class Evidence:
    """The first difference, and both records.

    `differences` are all differences of the same step, in the order in which a step computes them, by what was
    compared. `allowed` holds, by name, how far each element of the gradient before clipping may differ by rounding (a
    number or a tensor of the shape of the whole)."""

    reference: RecordedRun
    candidate: RecordedRun
    difference: Difference
    differences: Mapping[str, tuple[Difference, ...]]
    allowed: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return max(1, self.difference.step)

    def gradient_kind(self, run: RecordedRun) -> str:
        """The kind of tensors that holds a run's gradients before clipping: `unclipped` if the script clips."""
        own, theirs = self.reference.gradient_kinds(self.candidate, self.step)
        return own if run is self.reference else theirs

    def expected(self, name: str) -> Tensor | None:
        """The reference's gradient before clipping, in fp64."""
        return _wide(self.reference.whole(self.step, self.gradient_kind(self.reference), name))

    def recorded(self, name: str, rank: int | None = None) -> Tensor | None:
        """The candidate's gradient before clipping, in fp64; with `rank`, as that rank has the parts that it holds."""
        return _wide(self.candidate.whole(self.step, self.gradient_kind(self.candidate), name, rank))

    @property
    def differing_gradients(self) -> tuple[str, ...]:
        """The parameters whose gradient before clipping differs."""
        return tuple(difference.name for difference in self.differences.get("gradient", ()) if difference.name)

    def misfit(self, name: str, value: Tensor, expected: Tensor) -> float:
        """How far a value is from an expected one, relative to what rounding explains: at most 1 if they are equal."""
        allowed = self.allowed.get(name)
        if allowed is None:
            scale = float(expected.abs().max()) or 1.0
            return float((value - expected).abs().max()) / (1e-5 * scale)
        return float(((value - expected).abs() / allowed.clamp(min=1e-300)).max()) if value.numel() else 0.0


def _wide(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.to(torch.float64)
