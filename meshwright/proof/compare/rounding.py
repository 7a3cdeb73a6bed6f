"""How far rounding in a plan's own precision may change a number. This is measured on the model at hand.

(1) Noise. The reference computes the same step again, `NOISE_PASSES` times, with noise added to the output of every
    layer, to the gradient that comes back to it, and at the end to the gradients of the weights. Products are summed in
    fp32, in another order on other ranks: sums of n terms then differ by √n · eps32 / 2. Such a sum is rounded to a
    type whose numbers have the spacing s. Both sums are rounded to different numbers, s apart, if a rounding boundary
    lies between them, which has the probability √n · eps32 / 2s. That share of the elements, drawn at random and at
    least `MIN_FLIPPED` per layer, is changed by s. n is the layer's fan-in (layers without weights sum nothing); for
    gradients of weights it is samples × positions. Where a layer is split, its t ranks round partial sums that one
    device does not round: there every element is off by up to √(1 + t) · s / 2.                    → `RoundingNoise`
(2) Two measures of a tensor that differs from the reference's tensor r by d. `spread` is the root mean square of d
    divided by that of the layer of r. `projection` is the part of d in the direction of r, ⟨d, r⟩ / ⟨r, r⟩: a wrong
    factor shows there in full, while independent roundings mostly cancel.                            → `TensorError`
(3) Allowed is `SAFETY_FACTOR` times the largest error of the noise passes. Because a few passes may happen to leave one
    tensor almost unchanged, the allowed projection has two lower bounds: what independent roundings of all elements
    would leave, spread · √Σr⁴ / Σr², and the median over all tensors.                          → `rounding_allowance`
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.plan import Plan
from meshwright.proof.compare.errors import SMALLEST_SCALE, layer_name
from meshwright.proof.torch_private import tree_map

NOISE_PASSES = 8  # enough that rare events (a ReLU input that changes its sign) happen in one of them
SAFETY_FACTOR = 3.0
MIN_FLIPPED = 8  # an event that is rare per element may still happen several times in a small tensor
# The distance between 1.0 and the next number of the type that products are rounded to.
SPACING = {"fp32": 2.0**-23, "tf32": 2.0**-10, "bf16": 2.0**-7, "fp16": 2.0**-10, "fp8": 2.0**-3}

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class TensorError:
    """The two measures of (2) in the module's docstring. Both are infinite if the shapes differ, if only one side has
    the tensor and it is not all zeros, or if numbers are not finite and the two sides are not equal."""

    spread: float
    projection: float


@dataclass(frozen=True)
class RoundingAllowance:
    """The largest errors that rounding explains, by name: `tensors` for gradients and buffers, `numbers` for single
    numbers (the loss)."""

    tensors: Mapping[str, TensorError]
    numbers: Mapping[str, float]

    @property
    def typical_projection(self) -> float:
        """The median of the allowed projections of all tensors. A factor that is wrong by more than this is noticed in
        at least half of the tensors."""
        return median([error.projection for error in self.tensors.values()] or [0.0])

    def used_share(self, name: str, error: TensorError) -> float:
        """The error of a tensor divided by the allowed error of that tensor. An error with a share above 1 is too
        large."""
        allowed = self.tensors[name]
        return max(_ratio(error.spread, allowed.spread), _ratio(error.projection, allowed.projection))


@dataclass(frozen=True)
class RoundingNoise:
    """How differently ranks and one device round a value, relative to the value. Every element differs by up to
    `sum_error`, and the share `flipped_share` of the elements by `spacing`. Where ranks add up partial sums, every
    element differs by up to `partial_sum_error` as well."""

    sum_error: float
    spacing: float
    flipped_share: float
    partial_sum_error: float

    @property
    def rms(self) -> float:
        """The root mean square of the noise where no partial sums are added up."""
        return math.sqrt(self.sum_error**2 / 3 + self.spacing**2 * self.flipped_share)

    def add_to(self, value: Tensor, generator: torch.Generator, *, is_partial_sum: bool = False) -> Tensor:
        """The value with random noise of this size."""
        options: dict[str, Any] = {"generator": generator, "device": value.device, "dtype": torch.float32}
        uniform = 2 * torch.rand(value.shape, **options) - 1
        flipped_share = max(self.flipped_share, min(1.0, MIN_FLIPPED / max(1, value.numel())))
        is_flipped = torch.rand(value.shape, **options) < flipped_share
        everywhere = self.sum_error + self.partial_sum_error * is_partial_sum
        factors = 1 + everywhere * uniform + self.spacing * is_flipped * uniform.sign()
        return (value * factors).to(value.dtype)


def rounding_noise(plan: Plan, terms: int, device_type: str) -> RoundingNoise:
    """Returns the noise of values that are sums of `terms` terms, in the plan's precision."""
    precision = "fp32" if plan.numerics.precision == "tf32" and device_type != "cuda" else plan.numerics.precision
    spacing, sum_error = SPACING[precision], math.sqrt(terms) * SPACING["fp32"] / 2
    if precision == "fp32":
        return RoundingNoise(sum_error, 0.0, 0.0, 0.0)
    splits_over_replicas = any(split.axis == "replicate" for split in plan.modules.splits.values())
    ranks = max(plan.axes.tensor, plan.axes.replicate if splits_over_replicas else 1)
    return RoundingNoise(sum_error, spacing, min(1.0, sum_error / spacing), math.sqrt(1 + ranks) * spacing / 2)


@dataclass(frozen=True)
class PartialSumLayers:
    """The names of layers whose outputs (`forward`) or input gradients (`backward`) are sums to which each rank
    contributes a part."""

    forward: frozenset[str]
    backward: frozenset[str]


def partial_sum_layers(model: nn.Module, split_dims: Mapping[str, int]) -> PartialSumLayers:
    """Returns the layers in which ranks add up partial sums. `split_dims` is the dimension along which each weight is
    split, by name. A linear layer that is split along its input features (dim 1) does so in the forward pass, one that
    is split along its output features (dim 0) in the backward pass. Any other split layer is listed for both passes."""
    forward, backward = set(), set()
    for name, dim in split_dims.items():
        layer = layer_name(name)
        is_linear = isinstance(model.get_submodule(layer), nn.Linear)
        if name.endswith("bias"):
            continue
        forward |= {layer} if not is_linear or dim == 1 else set()
        backward |= {layer} if not is_linear or dim == 0 else set()
    return PartialSumLayers(frozenset(forward), frozenset(backward))


def communication_rounding(plan: Plan) -> float:
    """Returns the root mean square of what gradients lose when they are all-reduced in a type shorter than fp32,
    relative to the size of the single ranks' gradients. Those are rounded on every rank, and so is every sum of two.
    Returns 0 if they are all-reduced in fp32, or if there is one data rank."""
    if plan.gradients.precision == "fp32" or plan.data_ranks == 1:
        return 0.0
    return SPACING[plan.gradients.precision] / 2 * math.sqrt(2 * plan.data_ranks / 3)


@contextmanager
def inject_rounding_noise(
    model: nn.Module, noise_of_terms: Callable[[int], RoundingNoise], partial_sums: PartialSumLayers, seed: int
) -> Iterator[None]:
    """Within this context, adds noise to the output of every layer with weights, and to the gradient that comes back to
    this output. Layers of `partial_sums.backward` also get noise in the gradient of their inputs. `noise_of_terms`
    returns the noise of a sum, given its number of terms."""
    generators: dict[torch.device, torch.Generator] = {}

    def add_noise(terms: int, value: Tensor, is_partial_sum: bool) -> Tensor:
        if value.device not in generators:
            generators[value.device] = torch.Generator(value.device).manual_seed(seed)
        return noise_of_terms(terms).add_to(value, generators[value.device], is_partial_sum=is_partial_sum)

    hooks: list[Any] = []
    for name, module in model.named_modules():
        terms = _fan_in(module)
        if not terms:
            continue
        layer_noise = partial(add_noise, terms)
        hooks.append(module.register_forward_hook(partial(_change_output, layer_noise, name in partial_sums.forward)))
        if name in partial_sums.backward:
            hooks.append(module.register_forward_pre_hook(partial(_change_input_gradient, layer_noise)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _fan_in(module: nn.Module) -> int:
    """Returns the number of terms in a module's sums; 0 if it has no weights of its own, and 1 for an embedding table,
    whose rows are rounded but not summed."""
    weights = list(module.parameters(recurse=False))
    if not weights:
        return 0
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return 1
    return max(weight[0].numel() if weight.dim() > 1 else weight.numel() for weight in weights)


AddNoise = Callable[[Tensor, bool], Tensor]


def _change_output(add_noise: AddNoise, is_partial_sum: bool, module: nn.Module, arguments: Any, output: Any) -> Any:
    def change(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        changed = value + (add_noise(value.detach(), is_partial_sum) - value.detach())
        if changed.requires_grad:
            changed.register_hook(lambda gradient: add_noise(gradient, False))
        return changed

    return tree_map(change, output)


def _change_input_gradient(add_noise: AddNoise, module: nn.Module, arguments: Any) -> Any:
    def change(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        view = value.view_as(value)
        view.register_hook(lambda gradient: add_noise(gradient, True))
        return view

    return tree_map(change, arguments)


def rms_scales(expected: Tensors) -> dict[str, float]:
    """Returns the scale of each tensor, by name: the largest root mean square in its layer, and at least
    `SMALLEST_SCALE` times the largest root mean square in all layers."""
    layers: dict[str, float] = {}
    for name, tensor in expected.items():
        layers[layer_name(name)] = max(layers.get(layer_name(name), 0.0), _rms(tensor))
    smallest = SMALLEST_SCALE * max(layers.values(), default=0.0)
    return {name: max(layers[layer_name(name)], smallest) for name in expected}


def tensor_error(actual: Tensor | None, expected: Tensor | None, scale: float) -> TensorError:
    """Returns the two measures of (2) in the module's docstring. If one tensor is None, both measures are 0 if the
    other is None or all zeros, and infinite otherwise."""
    none, infinite = TensorError(0.0, 0.0), TensorError(math.inf, math.inf)
    if actual is None or expected is None:
        present = actual if actual is not None else expected
        return none if present is None or _rms(present) == 0 else infinite
    if actual.shape != expected.shape:
        return infinite
    difference, reference = actual.double() - expected.double(), expected.double()
    if not bool(difference.isfinite().all()):
        same_nan = torch.equal(actual.isnan(), expected.isnan())
        return none if same_nan and torch.equal(actual.nan_to_num(), expected.nan_to_num()) else infinite
    squared_size = float(reference.square().sum())
    # A tensor this small is what is left after large terms have cancelled. It is all rounding: its direction means
    # nothing.
    has_direction = squared_size > 0 and _rms(reference) >= SMALLEST_SCALE * scale
    projection = abs(float((difference * reference).sum())) / squared_size if has_direction else 0.0
    spread = _rms(difference)
    return TensorError(spread / scale if scale else (math.inf if spread else 0.0), projection)


def rounding_allowance(
    passes: list[dict[str, TensorError]],
    numbers: list[dict[str, float]],
    expected: Tensors,
    smallest_spreads: Mapping[str, float],
) -> RoundingAllowance:
    """Returns the allowance of (3) in the module's docstring. `passes` and `numbers` hold the errors of each noise
    pass, by name. `smallest_spreads` is a lower bound of each tensor's spread: every computed tensor is rounded at
    least once."""
    spreads = {name: max(smallest_spreads[name], *(errors[name].spread for errors in passes)) for name in expected}
    projections = {name: max(errors[name].projection for errors in passes) for name in expected}
    typical = median([projection for projection in projections.values() if projection > 0] or [0.0])
    tensors = {
        name: TensorError(
            SAFETY_FACTOR * spreads[name],
            SAFETY_FACTOR
            * max(projections[name], typical, spreads[name] / math.sqrt(_effective_elements(expected[name]))),
        )
        for name in expected
    }
    largest_numbers = {name: SAFETY_FACTOR * max(typical, *(errors[name] for errors in numbers)) for name in numbers[0]}
    return RoundingAllowance(tensors, largest_numbers)


def _ratio(error: float, allowed: float) -> float:
    if error == 0:
        return 0.0
    return error / allowed if allowed else math.inf


def _effective_elements(tensor: Tensor) -> float:
    """Returns (Σr²)² / Σr⁴: the number of equally large elements that a tensor would need for its direction to be as
    sensitive to rounding as that of this tensor, which a few large elements may dominate."""
    squares = tensor.double().square()
    fourth_powers = float(squares.square().sum())
    return max(1.0, float(squares.sum()) ** 2 / fourth_powers) if fourth_powers else 1.0


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0
