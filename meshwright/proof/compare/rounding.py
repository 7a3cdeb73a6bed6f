"""How far rounding in a plan's own precision may carry a number: measured, on the model at hand.

(1) Noise. The reference computes the same step again, `PASSES` times, while the output of every layer, and what comes
    back to it, is disturbed, and in the end the gradients are. Products are summed in fp32, in another order on other
    ranks: n terms then differ by √n · eps32 / 2. A rounding to the spacing s goes the other way where its edge lies in
    between, with the probability √n · eps32 / 2s, and the element is off by s. So many are, drawn at random, and at
    least `FEW` of a layer. n is its fan-in, and layers without weights sum nothing; of weights' gradients, the samples
    × positions. Where a layer is divided, its t ranks round parts of sums that one device does not: there all are, by
    up to √(1 + t) · s / 2.                                                                             → `Roundings`
(2) Two measures of a tensor d that is off the reference's r. `spread` is the root mean square of d, in the unit of its
    layer's. `along` is the part of d that lies in r's direction, ⟨d, r⟩ / ⟨r, r⟩: a wrong factor is all of that kind,
    while roundings, which know nothing of each other, mostly cancel in it.
(3) Allowed is `LAMBDA` times the largest of the passes. Along r no less than independent roundings of all elements
    would leave, spread · √Σr⁴ / Σr², and than the median of all tensors: a few passes may meet a lucky one.
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
from torch.utils._pytree import tree_map

from meshwright.plan import Plan
from meshwright.proof.compare.errors import CANCELLED, layer_of

PASSES = 8  # so that what happens once in a few, a ReLU that turns over, happens
LAMBDA = 3.0
FEW = 8  # a chance that comes once in many elements may come twice in a few
# Spacing behind 1.0 of what products are rounded to.
SPACING = {"fp32": 2.0**-23, "tf32": 2.0**-10, "bf16": 2.0**-7, "fp16": 2.0**-10, "fp8": 2.0**-3}

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Off:
    """By how much a tensor is off; infinite where only one side has it, or a number in it is none."""

    spread: float
    along: float


@dataclass(frozen=True)
class Allowed:
    """For every tensor, and for a single number (the loss, a norm)."""

    tensors: Mapping[str, Off]
    numbers: Mapping[str, float]

    @property
    def usual(self) -> float:
        """What a factor on a gradient must be off by to be seen, in a tensor where half of them have less."""
        return median([off.along for off in self.tensors.values()] or [0.0])

    def share(self, name: str, off: Off) -> float:
        """Of what is allowed; above 1 it is too much."""
        allowed = self.tensors[name]
        return max(_share(off.spread, allowed.spread), _share(off.along, allowed.along))


@dataclass(frozen=True)
class Roundings:
    """What ranks round otherwise than one device: all elements by up to the part `sums`, the share `turned` of them by
    the part `by`; and those that parts are summed up to, by up to `parts`."""

    sums: float
    by: float
    turned: float
    parts: float

    @property
    def size(self) -> float:
        """The root mean square, of what is not summed from parts."""
        return math.sqrt(self.sums**2 / 3 + self.by**2 * self.turned)

    def disturbed(self, value: Tensor, generator: torch.Generator, *, summed: bool = False) -> Tensor:
        options: dict[str, Any] = {"generator": generator, "device": value.device, "dtype": torch.float32}
        uniform = 2 * torch.rand(value.shape, **options) - 1
        turned = max(self.turned, min(1.0, FEW / max(1, value.numel())))
        turns = torch.rand(value.shape, **options) < turned
        factors = 1 + (self.sums + self.parts * summed) * uniform + self.by * turns * uniform.sign()
        return (value * factors).to(value.dtype)


def roundings_of(plan: Plan, terms: int, device_type: str) -> Roundings:
    """Where sums have so many terms."""
    precision = "fp32" if plan.numerics.precision == "tf32" and device_type != "cuda" else plan.numerics.precision
    spacing, sums = SPACING[precision], math.sqrt(terms) * SPACING["fp32"] / 2
    if precision == "fp32":
        return Roundings(sums, 0.0, 0.0, 0.0)
    wide = any(split.axis == "replicate" for split in plan.modules.splits.values())
    ranks = max(plan.axes.tensor, plan.axes.replicate if wide else 1)
    return Roundings(sums, spacing, min(1.0, sums / spacing), math.sqrt(1 + ranks) * spacing / 2)


@dataclass(frozen=True)
class Summed:
    """Which layers' outputs are sums of what ranks have computed in parts, and to which a gradient comes back so."""

    forward: frozenset[str]
    backward: frozenset[str]


def summed_layers(model: nn.Module, dims: Mapping[str, int]) -> Summed:
    """From the dimensions that their weights are cut along. A linear layer that is cut by rows sums in the forward
    pass, one that is cut by columns in the backward pass; of others we do not know."""
    forward, backward = set(), set()
    for name, dim in dims.items():
        layer = layer_of(name)
        known = isinstance(model.get_submodule(layer), nn.Linear)
        if name.endswith("bias"):
            continue
        forward |= {layer} if not known or dim == 1 else set()
        backward |= {layer} if not known or dim == 0 else set()
    return Summed(frozenset(forward), frozenset(backward))


def on_the_way(plan: Plan) -> float:
    """Root mean square of what gradients lose that travel in a shorter type, of their parts' size: those are rounded on
    every rank, and so is every sum of two."""
    if plan.gradients.precision == "fp32" or plan.data_ranks == 1:
        return 0.0
    return SPACING[plan.gradients.precision] / 2 * math.sqrt(2 * plan.data_ranks / 3)


@contextmanager
def rounding(model: nn.Module, roundings: Callable[[int], Roundings], summed: Summed, seed: int) -> Iterator[None]:
    """The output of every layer with weights is disturbed while this is open; `roundings` of sums of so many terms."""
    generators: dict[torch.device, torch.Generator] = {}

    def disturbed(terms: int, value: Tensor, parts: bool) -> Tensor:
        if value.device not in generators:
            generators[value.device] = torch.Generator(value.device).manual_seed(seed)
        return roundings(terms).disturbed(value, generators[value.device], summed=parts)

    hooks: list[Any] = []
    for name, module in model.named_modules():
        terms = _fan_in(module)
        if not terms:
            continue
        here = partial(disturbed, terms)
        hooks.append(module.register_forward_hook(partial(_disturb_output, here, name in summed.forward)))
        if name in summed.backward:
            hooks.append(module.register_forward_pre_hook(partial(_disturb_input_gradient, here)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _fan_in(module: nn.Module) -> int:
    """How many terms its sums have; 0 without weights of its own. A table's rows are not summed, but rounded."""
    weights = [p for p in module._parameters.values() if p is not None]
    if not weights:
        return 0
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return 1
    return max(p[0].numel() if p.dim() > 1 else p.numel() for p in weights)


Disturbed = Callable[[Tensor, bool], Tensor]


def _disturb_output(disturbed: Disturbed, parts: bool, module: nn.Module, arguments: Any, output: Any) -> Any:
    def change(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        moved = value + (disturbed(value.detach(), parts) - value.detach())
        if moved.requires_grad:
            moved.register_hook(lambda gradient: disturbed(gradient, False))
        return moved

    return tree_map(change, output)


def _disturb_input_gradient(disturbed: Disturbed, module: nn.Module, arguments: Any) -> Any:
    def change(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        through = value.view_as(value)
        through.register_hook(lambda gradient: disturbed(gradient, True))
        return through

    return tree_map(change, arguments)


def units(expected: Tensors) -> dict[str, float]:
    """Of each tensor: the largest root mean square in its layer, and no less than a part of the largest of all."""
    layers: dict[str, float] = {}
    for name, tensor in expected.items():
        layers[layer_of(name)] = max(layers.get(layer_of(name), 0.0), _rms(tensor))
    least = CANCELLED * max(layers.values(), default=0.0)
    return {name: max(layers[layer_of(name)], least) for name in expected}


def off(found: Tensor | None, expected: Tensor | None, unit: float) -> Off:
    if found is None or expected is None:
        given = found if found is not None else expected
        size = 0.0 if given is None else _rms(given)
        return Off(0.0, 0.0) if size == 0 else Off(math.inf, math.inf)
    if found.shape != expected.shape:
        return Off(math.inf, math.inf)
    difference, reference = found.double() - expected.double(), expected.double()
    if not bool(difference.isfinite().all()):
        same = torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(), expected.nan_to_num())
        return Off(0.0, 0.0) if same else Off(math.inf, math.inf)
    size = float(reference.square().sum())
    # What has been cancelled on its way is all rounding: it has no direction.
    directed = size > 0 and _rms(reference) >= CANCELLED * unit
    along = abs(float((difference * reference).sum())) / size if directed else 0.0
    spread = _rms(difference)
    return Off(spread / unit if unit else (math.inf if spread else 0.0), along)


def allowed(
    passes: list[dict[str, Off]], numbers: list[dict[str, float]], expected: Tensors, least: Mapping[str, float]
) -> Allowed:
    """From what the passes were off. No less than what is known to round each tensor: what is computed once is rounded
    once."""
    spreads = {name: max(least[name], *(each[name].spread for each in passes)) for name in expected}
    seen = {name: max(each[name].along for each in passes) for name in expected}
    usual = median([along for along in seen.values() if along > 0] or [0.0])
    tensors = {
        name: Off(
            LAMBDA * spreads[name],
            LAMBDA * max(seen[name], usual, spreads[name] / math.sqrt(_elements(expected[name]))),
        )
        for name in expected
    }
    told = {name: LAMBDA * max(usual, *(each[name] for each in numbers)) for name in numbers[0]}
    return Allowed(tensors, told)


def _share(found: float, most: float) -> float:
    if found == 0:
        return 0.0
    return found / most if most else math.inf


def _elements(tensor: Tensor) -> float:
    """How many elements of equal size would have a direction like this one's: a few large ones decide it."""
    squares = tensor.double().square()
    fourth = float(squares.square().sum())
    return max(1.0, float(squares.sum()) ** 2 / fourth) if fourth else 1.0


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0
