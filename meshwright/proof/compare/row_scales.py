"""The number that the difference of each single element is divided by, in a comparison in fp64 or fp32.

A layer has rows (output features, words of an embedding, heads, experts) whose values are a thousandth or a millionth
of the largest ones. Relative to the largest one, a row that is all wrong has a small error. So each element is measured
against its own row, down to what rounding explains:

(1) The row of an element. A tensor of d dimensions has d slices that hold the element. The smallest of their largest
    values is the scale r of the element. In a matrix this is the smaller of its row and its column, in a vector the
    element itself.                                                                              → `slice_scales`
(2) What rounding explains. Some values are zero in exact arithmetic, or the small rest of terms that cancel (the bias
    of a convolution before BatchNorm, the bias of keys, a layer before BatchNorm over few samples). Then r says nothing
    about their errors. The reference computes the same step in another precision, too (`measured_rounding.py`), and e
    is the largest error of the layer that was seen. Allowed is at least

        f = SAFETY_FACTOR · e

    The largest of a few errors may be small by chance. So a layer in which fewer than `FEWEST_ERRORS` elements had an
    error gets λ · eps · the largest value of the model in addition: a rounding of a sum of terms as large.
                                                                                                 → `RoundingErrors`
(3) One step. With the layer's scale L of `errors.py`, and the tolerance τ of `tolerance.py`, of which δ is what the
    drift of the weights adds, allowed is

        (τ - δ) · min(L, max(r, f / (τ - δ))) + δ · L                                            → `row_scales`

    which is never more than τ · L. Drift counts by layers, because a changed weight changes all terms of a sum.
(4) Weights after a step. An optimizer computes element by element: each of s steps rounds the weight, and its change u,
    which may come from a norm of the whole tensor, is as exact as gradients are. Allowed is the larger of what the
    perturbed optimizer says (`tolerance.py`) and

        min(τ · L, s · λ · eps · r + τ · Σ max|u|)                                               → `weight_scales`
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from meshwright.proof.compare.errors import SMALLEST_SCALE, layer_name, layer_scales
from meshwright.proof.compare.tolerance import LAMBDA, SumTolerance

SAFETY_FACTOR = 30.0  # one rounding of each sum was seen, and other orders of summing may be several times worse
FEWEST_ERRORS = 8  # the largest of so many errors is not by chance a thirtieth of a usual one
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class RoundingErrors:
    """By name, how far rounding was seen to change each element of gradients and buffers in one step."""

    gradients: Tensors
    buffers: Tensors


def slice_scales(tensor: Tensor) -> Tensor:
    """Returns, for each element, the smallest over all dimensions of the largest finite absolute value in the slice
    that holds the element."""
    magnitudes = tensor.abs().double().nan_to_num_(0.0, posinf=0.0)
    if tensor.dim() < 2 or not tensor.numel():
        return magnitudes
    dims = range(tensor.dim())
    largest = (magnitudes.amax([other for other in dims if other != dim], keepdim=True) for dim in dims)
    return reduce(torch.minimum, largest)  # the result has the shape of the tensor only after the last one


def gradient_scales(
    expected: Tensors, errors: RoundingErrors | None, tolerance: SumTolerance, drift: float
) -> dict[str, float | Tensor]:
    """Returns the scale of each gradient by name: those of rows, or those of layers if rounding was not measured."""
    layers = layer_scales(expected, SMALLEST_SCALE)
    return row_scales(expected, layers, errors.gradients if errors else None, tolerance, drift)


def buffer_scales(
    expected: Tensors, errors: RoundingErrors | None, tolerance: SumTolerance, drift: float
) -> dict[str, float | Tensor]:
    """Returns the scale of each buffer by name, as `gradient_scales` does for gradients."""
    return row_scales(expected, layer_scales(expected), errors.buffers if errors else None, tolerance, drift)


def row_scales(
    expected: Tensors, layers: Mapping[str, float], errors: Tensors | None, tolerance: SumTolerance, drift: float
) -> dict[str, float | Tensor]:
    """Returns the scales of equation (3), by name. `layers` are the scales of layers, and `errors` what rounding was
    seen to change; None if it was not measured."""
    if errors is None:
        return dict(layers)
    floors = _rounding_floors(layers, errors, tolerance)
    first, drifted = tolerance.first_step, tolerance.with_drift(drift)
    scales: dict[str, float | Tensor] = {}
    for name, value in expected.items():
        layer = layers[name]
        if not (value.is_floating_point() or value.is_complex()):
            scales[name] = layer
            continue
        rows = slice_scales(value).clamp(min=floors[name] / first, max=layer)
        scales[name] = (first * rows + (drifted - first) * layer) / drifted
    return scales


def weight_scales(
    before: Tensors, after: Tensors, changes: Mapping[str, float], step: int, tolerance: float, eps: float
) -> dict[str, float | Tensor]:
    """Returns the scales of equation (4), by name. `changes` holds the sum over all steps of the largest change of an
    element of each weight. Step 0 stands for the initial weights, which nothing has changed."""
    layers = layer_scales(after)
    scales: dict[str, float | Tensor] = {}
    for name, value in after.items():
        if not (value.is_floating_point() or value.is_complex()):
            scales[name] = layers[name]
            continue
        rows = torch.maximum(slice_scales(before[name]), slice_scales(value))
        share = min(1.0, step * LAMBDA * eps / tolerance) if step else 1.0
        scales[name] = (share * rows + changes.get(name, 0.0)).clamp(max=layers[name])
    return scales


def largest_changes(before: Tensors, after: Tensors) -> dict[str, float]:
    """Returns, by name, the largest change of an element; 0 for integers and empty tensors."""
    changes: dict[str, float] = {}
    for name, value in after.items():
        is_number = (value.is_floating_point() or value.is_complex()) and value.numel() > 0
        changes[name] = float((value - before[name]).abs().nan_to_num(0.0).max()) if is_number else 0.0
    return changes


def _rounding_floors(layers: Mapping[str, float], errors: Tensors, tolerance: SumTolerance) -> dict[str, float]:
    """Returns f of equation (2), by the names of `layers`. It is infinite for layers whose values are not finite in the
    other precision, and for those that have none there."""
    largest: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name, error in errors.items():
        layer = layer_name(name)
        finite = error.nan_to_num(math.inf, posinf=math.inf)
        largest[layer] = max(largest.get(layer, 0.0), float(finite.max()) if error.numel() else 0.0)
        counts[layer] = counts.get(layer, 0) + int((finite > 0).sum())
    usual = LAMBDA * torch.finfo(tolerance.dtype).eps * max(layers.values(), default=0.0)
    floors: dict[str, float] = {}
    for name in layers:
        layer = layer_name(name)
        floors[name] = SAFETY_FACTOR * largest[layer] if name in errors else math.inf
        floors[name] += usual if counts.get(layer, 0) < FEWEST_ERRORS else 0.0
    return floors
