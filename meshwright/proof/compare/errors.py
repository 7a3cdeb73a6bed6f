"""Compares what the ranks recorded with the reference, step by step, and says where they first differ.

A difference is measured in units: of a gradient or a buffer, the larger of the tensor's and its layer's scale; of a
weight, that too, or how far the optimizer may have carried a rounding error. A convolution's bias before BatchNorm
has a gradient of zero in exact arithmetic: by its own scale it would be all error.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

# Rounding errors arise in sums as large as the model's largest gradients: what is smaller by more than this has been
# cancelled on its way (a layer before BatchNorm over few samples), and its own scale says nothing about its errors.
CANCELLED = 1e-3

What = Literal["initial weight", "loss", "gradient", "gradient norm", "buffer", "weight"]
CHECKED: dict[What, str] = {
    "initial weight": "weights",
    "loss": "losses",
    "gradient": "gradients",
    "gradient norm": "norms",
    "buffer": "buffers",
    "weight": "weights",
}


@dataclass(frozen=True)
class Difference:
    """`parameter` of a loss is the first one on the way back through the model whose gradient differs, too; of a norm
    it is null. `rank` has it, where the first one's is right. `cause` is null until it has been looked for (diagnose):
    then a word, a sentence with the numbers, and the words that it is not."""

    step: int
    what: What
    parameter: str | None
    error: float
    rank: int = 0
    cause: str | None = None
    explanation: str | None = None
    ruled_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """What has been seen up to a step. `tolerance` is that of the last step, or of the first difference's."""

    tolerance: float = 0.0
    worst: float = 0.0
    losses: int = 0
    gradients: int = 0
    norms: int = 0
    buffers: int = 0
    weights: int = 0
    first: Difference | None = None

    def within(self, tolerance: float) -> "Comparison":
        return replace(self, tolerance=max(self.tolerance, tolerance))

    def seen(self, step: int, what: What, parameter: str | None, error: float, rank: int = 0) -> "Comparison":
        first = self.first
        if not error <= self.tolerance:
            if first is None:
                first = Difference(step, what, parameter, error, rank)
            elif first.what == "loss" and first.parameter is None and what == "gradient":
                first = replace(first, parameter=parameter)
        field = CHECKED[what]
        counts = {field: getattr(self, field) + 1}
        return replace(self, first=first, worst=max(self.worst, error), **counts)


def layer_of(name: str) -> str:
    return name.rpartition(".")[0]


def layer_scales(tensors: Mapping[str, Tensor], floor: float = 0.0) -> dict[str, float]:
    """Of each tensor: the largest value in its layer, and at least the part `floor` of the largest of all."""
    largest: dict[str, float] = {}
    for name, tensor in tensors.items():
        layer = layer_of(name)
        largest[layer] = max(largest.get(layer, 0.0), _largest(tensor))
    least = floor * max(largest.values(), default=0.0)
    return {name: max(largest[layer_of(name)], least) for name in tensors}


def error_of(found: Tensor | None, expected: Tensor | None, unit: float | Tensor) -> float:
    """The largest difference in units. What one side does not have is zero there; infinite where shapes differ or only
    one side is not a number."""
    if found is None or expected is None:
        given = found if found is not None else expected
        return 0.0 if given is None else error_of(given, torch.zeros_like(given), unit)
    if found.shape != expected.shape:
        return math.inf
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(found, expected) else math.inf
    wide = torch.complex128 if expected.is_complex() else torch.float64
    found, expected = found.to(wide), expected.to(wide)
    same = (found == expected) | (found.isnan() & expected.isnan())
    off = (found - expected).abs() / torch.as_tensor(unit, dtype=torch.float64)
    off = torch.where(same, 0.0, off)
    worst = float(off.max()) if off.numel() else 0.0
    return math.inf if math.isnan(worst) else worst


def drift_of(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """By which part of their size weights differ, in the layer where that is most: root mean squares, as what a few
    elements are off hardly moves what a layer computes."""
    sums: dict[str, tuple[float, float]] = {}
    for name, reference in expected.items():
        if name not in found or not reference.is_floating_point():
            continue
        off, size = sums.get(layer_of(name), (0.0, 0.0))
        difference = (found[name].double() - reference.double()).square().sum()
        sums[layer_of(name)] = (off + float(difference), size + float(reference.double().square().sum()))
    return max((math.sqrt(off / size) for off, size in sums.values() if size), default=0.0)


def _largest(tensor: Tensor) -> float:
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    found = tensor.abs().double()
    return float(found[found.isfinite()].max()) if found.isfinite().any() else 0.0
