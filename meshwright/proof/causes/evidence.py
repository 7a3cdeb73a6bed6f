"""`Evidence`: what is known of a step that differs, and how hypotheses are held against it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from meshwright.plan import Plan
from meshwright.proof.compare.errors import CANCELLED, Difference, error_of, layer_scales
from meshwright.proof.reference.experiments import Laboratory
from meshwright.train.output.recording import Recorded
from meshwright.train.output.witness import Witness

Tensors = dict[str, Tensor]
Cause = Literal[
    "different_start",
    "wrong_samples",
    "not_optimized",
    "local_clip",
    "missing_reduction",
    "doubled_reduction",
    "scaled",
    "uneven_targets",
    "batch_norm",
    "tied_drift",
    "randomness",
    "low_precision",
    "unknown",
]
_SLACK = 4  # an experiment sums in an order of its own


@dataclass(frozen=True)
class Verdict:
    """`residual`: how far what was found still is from what the cause explains, as errors are measured."""

    cause: Cause
    explanation: str
    residual: float = 0.0


@dataclass(frozen=True)
class Expected:
    """The step as it should have been; `before` and `after` are weights and buffers."""

    loss: Tensor
    norm: Tensor
    gradients: Tensors
    before: Tensors
    after: Tensors


@dataclass(frozen=True)
class Evidence:
    """`step` is the first difference's, or the first one where that was there before it. `dtype` is the shortest that
    either side was to compute in. `reference` is another run's plan, where that is what was expected, and
    `reference_seen` what its ranks saw."""

    plan: Plan
    first: Difference
    step: int
    tolerance: float
    clip_norm: float | None
    found: Recorded
    expected: Expected
    lab: Laboratory
    dtype: torch.dtype
    reference: Plan | None = None
    reference_seen: tuple[Witness, ...] = ()

    @property
    def seen(self) -> tuple[Witness, ...]:
        return self.found.seen

    @cached_property
    def scales(self) -> dict[str, float]:
        return layer_scales(self.expected.gradients, CANCELLED)

    def gradients_on(self, rank: int) -> Tensors:
        """As that rank had them."""
        return {**self.found.gradients, **self.found.gradients_of.get(rank, {})}

    @cached_property
    def gradients(self) -> Tensors:
        """Those that are to be explained: of the rank that differs."""
        return self.gradients_on(self.first.rank)

    @cached_property
    def wrong(self) -> tuple[str, ...]:
        """The weights whose gradient differs on that rank."""
        names = {*self.gradients, *self.expected.gradients}
        return tuple(
            sorted(
                name for name in names if not self.off(self.gradients, self.expected.gradients, name) <= self.tolerance
            )
        )

    @property
    def parameter(self) -> str | None:
        """The first difference's, by the first name that it has."""
        name = self.first.parameter
        return None if name is None else self.lab.first_names.get(name, name)

    @property
    def gradients_are_wrong(self) -> bool:
        return self.first.step > 0 and self.first.what in ("loss", "gradient", "gradient norm") and bool(self.wrong)

    def off(self, found: Mapping[str, Tensor], candidate: Mapping[str, Tensor], name: str) -> float:
        """By how much a gradient is not what a hypothesis makes of it."""
        given = candidate.get(name)
        unit = max(self.scales.get(name, 0.0), 0.0 if given is None or not given.numel() else float(given.abs().max()))
        return error_of(found.get(name), given, unit or min(self.scales.values(), default=1.0) or 1.0)

    def misfit(
        self, candidate: Mapping[str, Tensor], names: Iterable[str] | None = None, found: Tensors | None = None
    ) -> float:
        """The worst of all gradients, or of those named."""
        given = self.gradients if found is None else found
        chosen = {*given, *candidate} if names is None else names
        return max((self.off(given, candidate, name) for name in chosen), default=0.0)

    def fits(self, misfit: float) -> bool:
        return misfit <= _SLACK * self.tolerance

    def is_unusual(self, candidate: Tensors) -> bool:
        """Whether a rule makes other gradients than the right one: another run's may differ though none is broken."""
        return not self.fits(self.misfit(candidate, found=self.lab.usual.gradients))

    def loss_off(self, loss: float) -> float:
        """By how much the loss is not what a hypothesis makes of it."""
        unit = max(abs(float(self.expected.loss)), abs(loss)) or 1.0
        return abs(self.found_loss - loss) / unit

    def loss_fits(self, loss: float) -> bool:
        return self.fits(self.loss_off(loss))

    @property
    def found_loss(self) -> float:
        return self.seen[self.first.rank].loss

    @property
    def loss_is_right(self) -> bool:
        return self.loss_fits(float(self.expected.loss))

    def line(self, axis: str, rank: int) -> tuple[Witness, ...]:
        """The ranks that differ from this one by their place along the axis alone, in its order."""
        here = self.seen[rank].place
        others = {name: place for name, place in here.items() if name != axis}
        same = [w for w in self.seen if {n: p for n, p in w.place.items() if n != axis} == others]
        return tuple(sorted(same, key=lambda witness: witness.place.get(axis, 0)))

    def axes(self) -> dict[str, int]:
        """Those of more than one rank."""
        return {name: size for name, size in self.plan.axes.model_dump().items() if size > 1}

    @cached_property
    def divided(self) -> dict[str, str]:
        """Of every weight that some rank has a part of: the axis that divides it. FSDP2's rows are not in it."""
        return {name: axis for witness in self.seen for name, axis in witness.divided.items()}

    @cached_property
    def tied(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(holders) for witness in self.seen for name, holders in witness.tied.items()}


def mean_of(gradients: Iterable[Tensors], weight: float) -> Tensors:
    """Their sum times the weight."""
    result: Tensors = {}
    for each in gradients:
        for name, value in each.items():
            result[name] = result[name] + weight * value if name in result else weight * value
    return result


def listed(names: Iterable[str], most: int = 3) -> str:
    found = list(names)
    rest = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + rest
