"""`Comparing`: one side's steps held against the other's, in the order in which things come about."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from meshwright.proof.compare.errors import CANCELLED, Comparison, What, error_of, layer_scales
from meshwright.train.output.recording import Recorded

Tensors = dict[str, Tensor]


class Comparing:
    """Holds what has been seen so far. Where a rank has something otherwise than the first, it is compared, too."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [name for name, _ in model.named_parameters()]
        self.weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.seen = Comparison()
        self._largest_loss = 0.0

    def within(self, tolerance: float) -> None:
        self.seen = self.seen.within(tolerance)

    def loss(self, step: int, found: Recorded, expected: Tensor) -> None:
        self._largest_loss = max(self._largest_loss, float(expected.abs()))
        self._see(step, "loss", None, error_of(found.loss, expected.cpu(), self._largest_loss))
        for witness in found.seen:
            if witness.loss != float(found.loss):
                told = torch.tensor(witness.loss, dtype=torch.float64)
                self._see(step, "loss", None, error_of(told, expected.cpu(), self._largest_loss), witness.rank)

    def gradients(self, step: int, found: Recorded, expected: Tensors) -> dict[str, float]:
        """From the last layer to the first, as backward reaches them: where an error begins is told. Returns the
        scales they were measured against."""
        scales = layer_scales(expected, CANCELLED)
        smallest = min(scales.values(), default=0.0)
        for name in reversed(self.parameters):
            unit = scales.get(name, smallest)  # a layer that the reference did not reach
            self._see(step, "gradient", name, error_of(found.gradients.get(name), expected.get(name), unit))
        for rank, own in found.gradients_of.items():
            for name in reversed([name for name in self.parameters if name in own]):
                error = error_of(own[name], expected.get(name), scales.get(name, smallest))
                self._see(step, "gradient", name, error, rank)
        return scales

    def norm(self, step: int, found: Recorded, expected: Tensor) -> None:
        norm = norm_of(found.gradients.values()) if found.norm is None else found.norm
        self._see(step, "gradient norm", None, error_of(norm, expected.cpu(), float(expected)))

    def states(self, step: int, found: Recorded, expected: Tensors, carried: Tensors) -> None:
        """Step 0 is before the first one."""
        self._state(step, found.state, expected, carried, 0)
        for rank, own in found.state_of.items():
            there = {name: value for name, value in expected.items() if name in own}
            self._state(step, own, there, carried, rank)

    def _state(self, step: int, found: Tensors, expected: Tensors, carried: Tensors, rank: int) -> None:
        """Buffers first: they were there before the optimizer's step."""
        buffers = {name: value for name, value in expected.items() if name not in self.weights}
        weights = {name: value for name, value in expected.items() if name in self.weights}
        for name, scale in layer_scales(buffers).items():
            self._see(step, "buffer", name, _error(found, name, buffers[name], scale), rank)
        for name, scale in layer_scales(weights).items():
            unit: float | Tensor = scale
            if name in carried:
                unit = (carried[name].double() / self.seen.tolerance).clamp(min=scale)
            error = _error(found, name, weights[name], unit)
            self._see(step, "weight" if step else "initial weight", name, error, rank)

    def _see(self, step: int, what: What, parameter: str | None, error: float, rank: int = 0) -> None:
        self.seen = self.seen.seen(step, what, parameter, error, rank)


def norm_of(gradients: Iterable[Tensor]) -> Tensor:
    squares = sum(float(gradient.double().square().sum()) for gradient in gradients)
    return torch.tensor(math.sqrt(squares), dtype=torch.float64)


def kept_by_clipping(norm: Tensor, limit: float | None) -> float:
    """By which factor clipping shortened the gradients."""
    return 1.0 if limit is None or not float(norm) else min(1.0, limit / float(norm))


def _error(found: Tensors, name: str, expected: Tensor, unit: float | Tensor) -> float:
    """A weight or buffer that the plan's model does not have is as wrong as it can be."""
    return error_of(found[name], expected, unit) if name in found else math.inf
