"""How far two right computations may lie apart, derived from precision, reduction length and depth.

(1) One sum. Two orders of summing n rounded terms differ by at most λ·√n·eps of the terms' scale, but with
    probability 2·exp(-λ²/2) (Higham and Mary, 2019): with λ = 10 never, for any number of elements a model has.
    n is what the longest sum of the step runs over: samples × positions for gradients, fan-in for activations.
(2) One step. A gradient has passed `depth` layers forward and `depth` layers backward, each of which adds (1):

        tolerance = 2 · depth · λ · √n · eps                                    → `Sizes.tolerance`

(3) Steps. Once weights differ by a part ρ of their size, which was found to be rounding, each of the layers that
    a gradient passes is off by ρ more: the tolerance of the next step is (2) + 2 · depth · ρ.   → `Sizes.after`
(4) The optimizer. It may carry a small difference of a gradient far: Adam divides by √v, so at its first step a
    gradient near zero decides a whole ±lr. How far is not guessed: a second optimizer is given gradients that lie
    off by the tolerance, towards zero, from the first step on. What it makes of them, element by element, is how far
    the weights of a right plan may be off; twice that, as the plan's own gradients may be off the other way. → `Shadow`
(5) Weights that (4) lets go further than (2) are decided by rounding alone: a convolution's bias before BatchNorm,
    under Adam. Once found right, they go on as under the plan, or whatever they touch would drift with them. → `adopt`
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshwright.proof.reference.reference import Trained

LAMBDA = 10.0
_BOTH_WAYS = 2.0


@dataclass(frozen=True)
class Sizes:
    """Of one step: how many terms its longest sum has, and how many layers with weights a forward pass calls."""

    terms: int
    depth: int
    dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        """Of the first step."""
        return 2 * self.depth * LAMBDA * math.sqrt(self.terms) * torch.finfo(self.dtype).eps

    def after(self, drift: float) -> float:
        """Of a step that starts from weights which differ by the part `drift`."""
        return self.tolerance + 2 * self.depth * drift

    def __str__(self) -> str:
        eps = torch.finfo(self.dtype).eps
        return f"2 × {self.depth} layers × {LAMBDA:g} × √({self.terms:,} terms) × {eps:.2g}"


class Count:
    """Filled while a forward pass runs under `counted`."""

    def __init__(self) -> None:
        self.rows: dict[nn.Module, int] = {}
        self.calls = 0
        self.fan_in = 1

    def sizes(self, passes: int, dtype: torch.dtype) -> Sizes:
        """Of a step that made so many forward passes."""
        terms = max(self.rows.values(), default=1) + self.fan_in
        return Sizes(terms, max(1, round(self.calls / passes)), dtype)


@contextmanager
def counted(model: nn.Module) -> Iterator[Count]:
    """Counts what the modules with weights of their own reduce over."""
    count = Count()

    def note(module: nn.Module, arguments: object, output: object) -> None:
        result = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
        if result is None:
            return
        count.calls += 1
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 0:
                continue
            table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            rows = result.numel() // max(1, parameter.shape[-1 if table else 0])
            count.rows[module] = count.rows.get(module, 0) + rows
            count.fan_in = max(count.fan_in, 1 if table else parameter[0].numel())
            break  # a layer's first parameter is its weight

    own = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    hooks = [module.register_forward_hook(note) for module in own]
    try:
        yield count
    finally:
        for hook in hooks:
            hook.remove()


class Shadow(Trained):
    """The second optimizer of (4)."""

    @torch.no_grad()
    def follow(self, model: nn.Module, off: Mapping[str, float]) -> None:
        """Takes over a model's gradients, each moved towards zero by as much as it may be `off`."""
        own = dict(self.model.named_parameters())
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is None:
                own[name].grad = None
                continue
            own[name].grad = _moved(gradient, off[name])

    @torch.no_grad()
    def adopt(self, model: nn.Module, shifts: Mapping[str, Tensor]) -> None:
        """Moves a model's weights, and the own ones along with them."""
        for moved in (model, self.model):
            for name, parameter in moved.named_parameters():
                if name in shifts:
                    parameter.add_(shifts[name].to(parameter))

    @torch.no_grad()
    def carried(self, model: nn.Module) -> dict[str, Tensor]:
        """How far each weight may have been carried off by now, under all names that it has."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        named = model.named_parameters(remove_duplicate=False)
        return {name: _BOTH_WAYS * (own[name] - parameter).abs().cpu() for name, parameter in named}


def _moved(gradient: Tensor, off: float) -> Tensor:
    """Towards zero; of a sparse one the rows that are there."""
    if gradient.layout != torch.strided:
        rows = gradient.coalesce()
        moved = _moved(rows.values(), off)
        return torch.sparse_coo_tensor(rows.indices(), moved, rows.shape, is_coalesced=True, check_invariants=False)
    away = torch.where(gradient < 0, -1.0, 1.0).to(gradient.dtype)
    return gradient - away * off
