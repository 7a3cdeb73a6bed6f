"""How large the difference between two tensors is, and where two trainings first differ by more than the tolerance.

An error is a difference divided by a scale. For a gradient or a buffer, the scale is the largest value in its layer.
For a weight, it is also the largest value in its layer, or larger where the optimizer may have enlarged a rounding
error. The scale is not taken from the tensor alone, because some tensors are zero in exact arithmetic: the gradient of
a convolution's bias before BatchNorm, for example. Relative to its own largest value, such a tensor consists of errors
only.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

# The smallest scale of a gradient, relative to the largest gradient in the model. Rounding errors come from sums that
# are as large as the largest gradient. A gradient that is smaller by more than this factor is what is left after large
# terms have cancelled (a layer before BatchNorm over few samples), so its own size says nothing about its errors.
SMALLEST_SCALE = 1e-3

ComparedKind = Literal["initial weight", "loss", "gradient", "gradient norm", "buffer", "weight"]
# The field of `Comparison` that counts the tensors or numbers of each kind.
COUNTER_OF: dict[ComparedKind, str] = {
    "initial weight": "weights",
    "loss": "losses",
    "gradient": "gradients",
    "gradient norm": "norms",
    "buffer": "buffers",
    "weight": "weights",
}


@dataclass(frozen=True)
class ComparedValue:
    """One loss, gradient, norm, buffer or weight that was compared: its error and the tolerance that applied to it. The
    value is rank 0's, or that of another rank whose value differs from it."""

    step: int
    what: ComparedKind
    parameter: str | None
    rank: int
    error: float
    tolerance: float

    @property
    def is_equal(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class ExaminedCause:
    """A cause that would explain the first difference: a sentence with its numbers, and the residual, the error that
    remains after the cause is taken into account."""

    cause: str
    explanation: str
    residual: float


@dataclass(frozen=True)
class Difference:
    """The first value that differs by more than the tolerance.

    `parameter` is the name of the tensor. For a loss it is the first parameter in backward order whose gradient differs
    as well (None if none does); for a gradient norm it is None. `rank` is the rank whose value differs: 0, unless rank
    0's value is right. `cause`, `explanation` and `ruled_out` are empty until `diagnose` has looked for the cause. Then
    they are the cause's name, a sentence with the numbers, and the names of the causes that do not fit. `fitting` are
    all causes that fit, of which `cause` is the best. `operator` names the first operator of the forward pass whose
    values differ, with its line; None if that was not looked for, or not found.
    """

    step: int
    what: ComparedKind
    parameter: str | None
    error: float
    rank: int = 0
    cause: str | None = None
    explanation: str | None = None
    ruled_out: tuple[str, ...] = ()
    fitting: tuple[ExaminedCause, ...] = ()
    operator: str | None = None


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison so far: the largest error, how many values were compared, and the first difference.

    `tolerance` is the tolerance of the last step that was compared. Callers stop at the first step with a difference,
    so it is also the tolerance of the first difference.
    """

    tolerance: float = 0.0
    largest_error: float = 0.0
    losses: int = 0
    gradients: int = 0
    norms: int = 0
    buffers: int = 0
    weights: int = 0
    first_difference: Difference | None = None

    def with_tolerance(self, tolerance: float) -> "Comparison":
        """Returns the same comparison with its tolerance raised to at least this one."""
        return replace(self, tolerance=max(self.tolerance, tolerance))

    def with_error(
        self, step: int, what: ComparedKind, parameter: str | None, error: float, rank: int = 0
    ) -> "Comparison":
        """Returns the comparison with one more compared value, which has this error."""
        first = self.first_difference
        if not error <= self.tolerance:
            if first is None:
                first = Difference(step, what, parameter, error, rank)
            elif first.what == "loss" and first.parameter is None and what == "gradient":
                first = replace(first, parameter=parameter)
        counter = COUNTER_OF[what]
        counts = {counter: getattr(self, counter) + 1}
        return replace(self, first_difference=first, largest_error=max(self.largest_error, error), **counts)


def layer_name(name: str) -> str:
    """The name of the module that a parameter or buffer belongs to."""
    return name.rpartition(".")[0]


def layer_scales(tensors: Mapping[str, Tensor], floor: float = 0.0) -> dict[str, float]:
    """Returns the scale of each tensor, by name: the largest absolute value in its layer, and at least `floor` times
    the largest absolute value in all layers."""
    largest: dict[str, float] = {}
    for name, tensor in tensors.items():
        layer = layer_name(name)
        largest[layer] = max(largest.get(layer, 0.0), _largest_magnitude(tensor))
    smallest = floor * max(largest.values(), default=0.0)
    return {name: max(largest[layer_name(name)], smallest) for name in tensors}


def scaled_error(actual: Tensor | None, expected: Tensor | None, scale: float | Tensor) -> float:
    """The largest difference between elements, divided by the scale.

    A tensor that is None counts as zeros. The error is infinite where shapes differ, where integers differ, or where
    only one side is not a number.
    """
    if actual is None or expected is None:
        present = actual if actual is not None else expected
        return 0.0 if present is None else scaled_error(present, torch.zeros_like(present), scale)
    if actual.shape != expected.shape:
        return math.inf
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(actual, expected) else math.inf
    wide = torch.complex128 if expected.is_complex() else torch.float64
    actual, expected = actual.to(wide), expected.to(wide)
    divisor = torch.as_tensor(scale, dtype=torch.float64)
    if actual.numel():
        largest = float((actual - expected).abs().div_(divisor).max())
        if math.isfinite(largest):  # so all numbers are finite, and no 0 was divided by 0
            return largest
    is_same = (actual == expected) | (actual.isnan() & expected.isnan())
    errors = (actual - expected).abs() / divisor
    errors = torch.where(is_same, 0.0, errors)
    largest = float(errors.max()) if errors.numel() else 0.0
    return math.inf if math.isnan(largest) else largest


def weight_drift(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Returns the relative difference of the weights in the layer where it is largest. It is a ratio of root mean
    squares, because a few elements that differ hardly change what a layer computes."""
    sums: dict[str, tuple[float, float]] = {}
    for name, reference in expected.items():
        if name not in actual or not reference.is_floating_point():
            continue
        squared_error, squared_size = sums.get(layer_name(name), (0.0, 0.0))
        difference = (actual[name].double() - reference.double()).square().sum()
        sums[layer_name(name)] = (
            squared_error + float(difference),
            squared_size + float(reference.double().square().sum()),
        )
    return max((math.sqrt(error / size) for error, size in sums.values() if size), default=0.0)


def _largest_magnitude(tensor: Tensor) -> float:
    """The largest finite absolute value; 0 if the tensor has none, or if it holds integers."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    if tensor.is_floating_point():
        smallest, largest = map(float, tensor.aminmax())
        if math.isfinite(smallest) and math.isfinite(largest):
            return max(-smallest, largest)
    magnitudes = tensor.abs().double()
    return float(magnitudes[magnitudes.isfinite()].max()) if magnitudes.isfinite().any() else 0.0
