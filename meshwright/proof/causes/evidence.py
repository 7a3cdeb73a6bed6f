"""`Evidence`: what is known of the step that differs, and how well a hypothesis explains the difference."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from meshwright.plan import Plan
from meshwright.proof.compare.errors import SMALLEST_SCALE, Difference, layer_scales, scaled_error
from meshwright.proof.compare.row_scales import slice_scales
from meshwright.proof.reference.experiments import Experiments, add_scaled
from meshwright.train.output.observation import RankObservation
from meshwright.train.output.record_file import RecordedStep

Tensors = dict[str, Tensor]
Cause = Literal[
    "different_start",
    "wrong_samples",
    "not_optimized",
    "local_clip",
    "lost_tokens",
    "expert_gradients",
    "missing_reduction",
    "doubled_reduction",
    "scaled",
    "coupled_samples",
    "unweighted_shares",
    "uneven_targets",
    "divided_batch",
    "wrong_past",
    "wrong_positions",
    "lost_targets",
    "batch_norm",
    "batch_buffer",
    "tied_drift",
    "randomness",
    "low_precision",
    "unknown",
]
_SLACK = 4  # times the tolerance, because an experiment adds up in another order than the reference


@dataclass(frozen=True)
class Verdict:
    """A cause that explains the difference. `residual` is the error that this cause leaves unexplained."""

    cause: Cause
    explanation: str
    residual: float = 0.0


@dataclass(frozen=True)
class ExpectedStep:
    """The step as it should have been. `before` and `after` are the weights and buffers before and after the step.
    `scales` holds, by name, what the errors of gradients were divided by; if it is None, the scales of layers."""

    loss: Tensor
    norm: Tensor
    gradients: Tensors
    before: Tensors
    after: Tensors
    scales: Mapping[str, float | Tensor] | None = None


@dataclass(frozen=True)
class Evidence:
    """The first difference, with the recorded and the expected step.

    `step` is the step of the difference, or 1 if weights differed before the first step. `dtype` is the shortest type
    that either side was meant to compute in. When two runs are compared, `reference_plan` and `reference_observations`
    belong to the run that was taken as right. When a plan is compared with one device, they are None and empty.
    """

    plan: Plan
    difference: Difference
    step: int
    tolerance: float
    clip_norm: float | None
    recorded: RecordedStep
    expected: ExpectedStep
    experiments: Experiments
    dtype: torch.dtype
    reference_plan: Plan | None = None
    reference_observations: tuple[RankObservation, ...] = ()

    # ---- gradients

    @cached_property
    def layer_scales(self) -> dict[str, float]:
        """The scale of each gradient's layer, by name."""
        return layer_scales(self.expected.gradients, SMALLEST_SCALE)

    @cached_property
    def scales(self) -> Mapping[str, float | Tensor]:
        """The number that each gradient's error is divided by, or the number for each of its elements, by name."""
        return self.layer_scales if self.expected.scales is None else self.expected.scales

    def gradients_on(self, rank: int) -> Tensors:
        """Returns the gradients that this rank had, by name."""
        return {**self.recorded.gradients, **self.recorded.differing_gradients.get(rank, {})}

    @cached_property
    def gradients(self) -> Tensors:
        """The gradients to be explained: those of the rank that the first difference was found on."""
        return self.gradients_on(self.difference.rank)

    @cached_property
    def differing_names(self) -> tuple[str, ...]:
        """The parameters whose gradient in `gradients` differs from the expected one, sorted."""
        names = {*self.gradients, *self.expected.gradients}
        expected = self.expected.gradients
        return tuple(
            sorted(name for name in names if not self.gradient_error(self.gradients, expected, name) <= self.tolerance)
        )

    @property
    def parameter(self) -> str | None:
        """The first name of the parameter of the first difference (tied parameters have several); None if that has no
        parameter."""
        name = self.difference.parameter
        return None if name is None else self.experiments.canonical_names.get(name, name)

    @property
    def gradients_differ(self) -> bool:
        """Whether the first difference is in the loss, a gradient or the gradient norm, and some gradient differs."""
        first = self.difference
        return first.step > 0 and first.what in ("loss", "gradient", "gradient norm") and bool(self.differing_names)

    def gradient_error(self, gradients: Mapping[str, Tensor], candidate: Mapping[str, Tensor], name: str) -> float:
        """Returns the error that `gradients[name]` would have if the candidate's gradient were the right one."""
        right = candidate.get(name)
        scale = torch.as_tensor(self._candidate_scale(name, right), dtype=torch.float64)
        smallest = min(self.layer_scales.values(), default=1.0) or 1.0
        return scaled_error(gradients.get(name), right, torch.where(scale > 0, scale, smallest))

    def _candidate_scale(self, name: str, candidate: Tensor | None) -> float | Tensor:
        """Returns what the error of a gradient is divided by if the candidate is the right one. Rounding errors grow
        with the size of the terms: if the candidate is larger than the expected gradient, so is the scale."""
        scale, layer = self.scales.get(name, 0.0), self.layer_scales.get(name, 0.0)
        if candidate is None or not candidate.numel():
            return scale
        largest = float(candidate.abs().max())
        if not isinstance(scale, Tensor) or scale.shape != candidate.shape:
            return max(layer, largest)
        expected = float(self.expected.gradients[name].abs().max())
        growth = max(1.0, largest / expected) if expected else math.inf
        return (scale * growth).maximum(slice_scales(candidate)).clamp(max=max(layer, largest))

    def misfit(
        self, candidate: Mapping[str, Tensor], names: Iterable[str] | None = None, gradients: Tensors | None = None
    ) -> float:
        """Returns the largest error that gradients would have if the candidate's were the right ones. It is taken over
        the gradients in `names`, or over all of them. The gradients are those of the rank that differs, unless
        `gradients` are given."""
        compared = self.gradients if gradients is None else gradients
        names = {*compared, *candidate} if names is None else names
        return max((self.gradient_error(compared, candidate, name) for name in names), default=0.0)

    @property
    def largest_layer_error(self) -> float:
        """The largest error of a gradient, relative to the largest value of its layer."""
        expected, smallest = self.expected.gradients, min(self.layer_scales.values(), default=1.0) or 1.0
        return max(
            scaled_error(self.gradients.get(name), expected.get(name), self.layer_scales.get(name, 0.0) or smallest)
            for name in {*self.gradients, *expected}
        )

    def fits(self, misfit: float) -> bool:
        """Whether an error is small enough to be due to rounding."""
        return misfit <= _SLACK * self.tolerance

    def is_distinguishable(self, candidate: Tensors) -> bool:
        """Whether `candidate`, the gradients by some wrong rule, differs from the gradients that one device computes by
        the right rule. If it does not, the rule explains nothing: gradients of two runs may differ although both follow
        the right rule."""
        return not self.fits(self.misfit(candidate, gradients=self.experiments.reference_step.gradients))

    # ---- loss

    @property
    def recorded_loss(self) -> float:
        return self.observations[self.difference.rank].loss

    def loss_error(self, loss: float) -> float:
        """Returns the error that the recorded loss would have if this loss were right."""
        scale = max(abs(float(self.expected.loss)), abs(loss)) or 1.0
        return abs(self.recorded_loss - loss) / scale

    def loss_fits(self, loss: float) -> bool:
        return self.fits(self.loss_error(loss))

    @property
    def loss_is_right(self) -> bool:
        return self.loss_fits(float(self.expected.loss))

    # ---- ranks

    @property
    def observations(self) -> tuple[RankObservation, ...]:
        """What each rank observed in this step."""
        return self.recorded.observations

    def ranks_along(self, axis: str, rank: int) -> tuple[RankObservation, ...]:
        """Returns the observations of the ranks whose coordinates equal those of `rank` except along this axis. They
        are sorted by their coordinate along the axis, and include `rank`."""
        others = _without(axis, self.observations[rank].coordinates)
        line = [observation for observation in self.observations if _without(axis, observation.coordinates) == others]
        return tuple(sorted(line, key=lambda observation: observation.coordinates.get(axis, 0)))

    def used_axes(self) -> dict[str, int]:
        """Returns the sizes of the mesh's axes with more than one rank, by name. If experts are divided, they are not
        those of the plan: the ranks of the expert axis are taken from those of replicate or shard."""
        sizes = self.plan.axes.factors
        if self.plan.axes.expert > 1:
            coordinates = [observation.coordinates for observation in self.observations]
            sizes = {axis: 1 + max(place[axis] for place in coordinates) for axis in coordinates[0]}
        return sizes

    @cached_property
    def split_axes(self) -> dict[str, str]:
        """For each split parameter, the axis along which it is split. Parameters that only FSDP2 shards are not
        included."""
        return {name: axis for observation in self.observations for name, axis in observation.split_axes.items()}

    @cached_property
    def tied_stages(self) -> dict[str, tuple[int, ...]]:
        """For each tied parameter, the pipeline stages that hold a copy of it."""
        observed = [item for observation in self.observations for item in observation.tied_stages.items()]
        return {name: tuple(stages) for name, stages in observed}


def _without(axis: str, coordinates: Mapping[str, int]) -> dict[str, int]:
    return {name: coordinate for name, coordinate in coordinates.items() if name != axis}


def weighted_sum(gradients: Iterable[Tensors], weight: float) -> Tensors:
    """Returns the sum of several sets of gradients, by name, times the weight."""
    total: Tensors = {}
    for addends in gradients:
        total = add_scaled(total, addends, weight)
    return total


def join_names(names: Iterable[str], most: int = 3) -> str:
    """Returns the first `most` names as text, with the number of further names."""
    listed = list(names)
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + rest
