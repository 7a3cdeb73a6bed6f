"""How far two correct computations may differ, derived from precision, reduction length and depth.

(1) One sum. Two orders of summing n rounded terms differ by at most λ·√n·eps of the terms' scale, except with
    probability 2·exp(-λ²/2) (Higham and Mary, 2019): with λ = 10 never, for any number of elements a model has.
    Gradients are sums of samples × positions terms, activations of fan-in terms; n is the sum of the largest of both.
(2) One step. A gradient has passed `depth` layers forward and `depth` layers backward, each of which adds (1):

        tolerance = 2 · depth · λ · √n · eps                                    → `SumTolerance.first_step`

(3) Later steps. Once the weights differ by the relative amount ρ, which was found to be rounding, each layer that a
    gradient passes adds ρ: the tolerance of the next step is (2) + 2 · depth · ρ.   → `SumTolerance.with_drift`
(4) The optimizer. It may enlarge a small difference of a gradient: Adam divides by √v, so in its first step the sign
    of a gradient near zero decides a whole ±lr. How much it enlarges one is measured: a second optimizer gets gradients
    that are moved towards zero by the tolerance, from the first step on. The weights of a correct plan may differ,
    element by element, by twice the distance between the weights of both optimizers: twice, because the plan's
    gradients may differ in the other direction.
                                                                                → `PerturbedTraining`
(5) Weights whose bound by (4) is larger than (2) are decided by rounding alone: for example, under Adam, the bias of a
    convolution before BatchNorm. If they are within the bound, the reference continues with the plan's values, because
    otherwise everything that depends on them would drift apart.                → `PerturbedTraining.shift_weights`
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.proof.reference.reference import PlainTraining
from meshwright.proof.torch_private import tree_leaves

LAMBDA = 10.0
_BOTH_DIRECTIONS = 2.0


@dataclass(frozen=True)
class SumTolerance:
    """The tolerance of equations (2) and (3). `terms` is n. `depth` is the number of layers with weights that a forward
    pass calls."""

    terms: int
    depth: int
    dtype: torch.dtype

    @property
    def first_step(self) -> float:
        """The tolerance of a step that starts from equal weights."""
        return 2 * self.depth * LAMBDA * math.sqrt(self.terms) * torch.finfo(self.dtype).eps

    def with_drift(self, drift: float) -> float:
        """The tolerance of a step that starts from weights with this relative difference."""
        return self.first_step + 2 * self.depth * drift

    def __str__(self) -> str:
        eps = torch.finfo(self.dtype).eps
        return f"2 × {self.depth} layers × {LAMBDA:g} × √({self.terms:,} terms) × {eps:.2g}"


class ReductionCounter:
    """Counts the terms of sums while forward passes run inside `count_reductions`. `rows` is, for each module, the
    number of samples × positions that the gradient of its weight is summed over. `calls` is the number of calls of
    modules with parameters. `fan_in` is the largest number of terms of an activation."""

    def __init__(self) -> None:
        self.rows: dict[nn.Module, int] = {}
        self.calls = 0
        self.fan_in = 1

    def tolerance(self, passes: int, dtype: torch.dtype) -> SumTolerance:
        """Returns the tolerance of a step that made `passes` forward passes."""
        terms = max(self.rows.values(), default=1) + self.fan_in
        return SumTolerance(terms, max(1, round(self.calls / passes)), dtype)


@contextmanager
def count_reductions(model: nn.Module) -> Iterator[ReductionCounter]:
    """Within this context, counts how many terms are summed by the modules that have parameters of their own."""
    counter = ReductionCounter()

    def count_call(module: nn.Module, arguments: object, output: object) -> None:
        result = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
        if result is None:
            return
        counter.calls += 1
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 0:
                continue
            is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            rows = result.numel() // max(1, parameter.shape[-1 if is_table else 0])
            counter.rows[module] = counter.rows.get(module, 0) + rows
            counter.fan_in = max(counter.fan_in, 1 if is_table else parameter[0].numel())
            break  # a layer's first parameter is its weight

    layers = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    hooks = [layer.register_forward_hook(count_call) for layer in layers]
    try:
        yield counter
    finally:
        for hook in hooks:
            hook.remove()


class PerturbedTraining(PlainTraining):
    """The second optimizer of equation (4), with its own copy of the model. It trains with the reference's gradients,
    each moved towards zero by the tolerance."""

    @torch.no_grad()
    def take_perturbed_gradients(self, model: nn.Module, perturbations: Mapping[str, float | Tensor]) -> None:
        """Copies the gradients of `model`, each moved towards zero by the number, or the number for each element, that
        `perturbations` has under its name."""
        parameters = dict(self.model.named_parameters())
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is None:
                parameters[name].grad = None
                continue
            parameters[name].grad = _towards_zero(gradient, perturbations[name])

    @torch.no_grad()
    def shift_weights(self, model: nn.Module, shifts: Mapping[str, Tensor]) -> None:
        """Adds the shifts to the weights of the given model and of this training's model."""
        for shifted in (model, self.model):
            for name, parameter in shifted.named_parameters():
                if name in shifts:
                    parameter.add_(shifts[name].to(parameter))

    @torch.no_grad()
    def weight_bounds(self, model: nn.Module) -> dict[str, Tensor]:
        """Returns, by name, how far each element of each weight may differ from that of `model` by now. A tied weight
        has an entry under each of its names."""
        perturbed = dict(self.model.named_parameters(remove_duplicate=False))
        parameters = model.named_parameters(remove_duplicate=False)
        return {name: _BOTH_DIRECTIONS * (perturbed[name] - weight).abs().cpu() for name, weight in parameters}


def _towards_zero(gradient: Tensor, distance: float | Tensor) -> Tensor:
    """Returns the gradient with every element moved by `distance` in the direction of zero. Of a sparse gradient, only
    the stored rows are moved."""
    if isinstance(distance, Tensor):
        distance = distance.to(gradient.device)
    if gradient.layout != torch.strided:
        rows = gradient.coalesce()
        stored = distance[tuple(rows.indices())] if isinstance(distance, Tensor) else distance
        moved = _towards_zero(rows.values(), stored)
        return torch.sparse_coo_tensor(rows.indices(), moved, rows.shape, is_coalesced=True, check_invariants=False)
    direction = torch.where(gradient == 0, 1.0, gradient.sgn())
    return gradient - (direction * distance).to(gradient.dtype)
