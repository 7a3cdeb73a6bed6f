"""`StepComparator`: compares recorded steps with expected ones, value by value in the order in which a step computes
them."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from meshwright.proof.compare.errors import (
    SMALLEST_SCALE,
    ComparedKind,
    ComparedValue,
    Comparison,
    layer_scales,
    scaled_error,
)
from meshwright.train.output.record_file import RecordedStep

Tensors = dict[str, Tensor]
Scales = Mapping[str, float | Tensor]


class StepComparator:
    """Compares recorded steps with expected ones, and collects the result in `comparison`, and every compared value in
    `values`. It compares rank 0's values, and the values of other ranks that differ from rank 0's."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [name for name, _ in model.named_parameters()]
        self.weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.comparison = Comparison()
        self.values: list[ComparedValue] = []
        self._largest_loss = 0.0

    def raise_tolerance(self, tolerance: float) -> None:
        self.comparison = self.comparison.with_tolerance(tolerance)

    def compare_loss(self, step: int, recorded: RecordedStep, expected: Tensor) -> None:
        self._largest_loss = max(self._largest_loss, float(expected.abs()))
        for rank, loss in losses_by_rank(recorded):
            self.add(step, "loss", None, scaled_error(loss, expected.cpu(), self._largest_loss), rank)

    def compare_gradients(self, step: int, recorded: RecordedStep, expected: Tensors, scales: Scales) -> None:
        """Compares the gradients in the order in which backward computes them, from the last layer to the first.
        Therefore the first difference is where an error begins. `scales` holds, by name, what each gradient's error is
        divided by."""
        # the scale of gradients that the reference does not have
        smallest = min(layer_scales(expected, SMALLEST_SCALE).values(), default=0.0)
        for name in reversed(self.parameters):
            error = scaled_error(recorded.gradients.get(name), expected.get(name), scales.get(name, smallest))
            self.add(step, "gradient", name, error)
        for rank, gradients in recorded.differing_gradients.items():
            for name in reversed([name for name in self.parameters if name in gradients]):
                error = scaled_error(gradients[name], expected.get(name), scales.get(name, smallest))
                self.add(step, "gradient", name, error, rank)

    def compare_norm(self, step: int, recorded: RecordedStep, expected: Tensor) -> None:
        norm = global_norm(recorded.gradients.values()) if recorded.norm is None else recorded.norm
        self.add(step, "gradient norm", None, scaled_error(norm, expected.cpu(), float(expected)))

    def compare_states(
        self, step: int, recorded: RecordedStep, expected: Tensors, weight_bounds: Tensors, scales: Scales | None = None
    ) -> None:
        """Compares buffers and weights after a step. Step 0 stands for those before the first step. `weight_bounds`
        holds, by name, how far each element of a weight may differ; it counts where it is larger than what the
        tolerance allows. `scales` holds, by name, what errors are divided by: without it, the scales of layers."""
        buffers, weights = self.divide_state(expected)
        scales = scales or {**layer_scales(buffers), **layer_scales(weights)}
        for rank, state in ((0, recorded.state), *recorded.differing_states.items()):
            names = expected.keys() if rank == 0 else expected.keys() & state.keys()
            # Buffers come first, because they were updated before the optimizer step.
            for name in (name for name in buffers if name in names):
                self.add(step, "buffer", name, _error_or_missing(state, name, buffers[name], scales[name]), rank)
            for name in (name for name in weights if name in names):
                scale = scales[name]
                if name in weight_bounds:
                    bound = weight_bounds[name].double() / self.comparison.tolerance
                    scale = torch.maximum(bound, torch.as_tensor(scale, dtype=torch.float64))
                error = _error_or_missing(state, name, weights[name], scale)
                self.add(step, "weight" if step else "initial weight", name, error, rank)

    def divide_state(self, state: Tensors) -> tuple[Tensors, Tensors]:
        """Returns the buffers and the weights of a state dict."""
        buffers = {name: value for name, value in state.items() if name not in self.weights}
        weights = {name: value for name, value in state.items() if name in self.weights}
        return buffers, weights

    def add(self, step: int, what: ComparedKind, parameter: str | None, error: float, rank: int = 0) -> None:
        """Adds the error of one value to the comparison."""
        self.comparison = self.comparison.with_error(step, what, parameter, error, rank)
        self.values.append(ComparedValue(step, what, parameter, rank, error, self.comparison.tolerance))


def losses_by_rank(recorded: RecordedStep) -> list[tuple[int, Tensor]]:
    """Returns pairs (rank, loss): rank 0's loss, and the losses of the ranks that reported a different one."""
    others = [observation for observation in recorded.observations if observation.loss != float(recorded.loss)]
    return [
        (0, recorded.loss),
        *((observation.rank, torch.tensor(observation.loss, dtype=torch.float64)) for observation in others),
    ]


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The L2 norm of all gradients together."""
    squares = sum(float(gradient.double().square().sum()) for gradient in gradients)
    return torch.tensor(math.sqrt(squares), dtype=torch.float64)


def clip_factor(norm: Tensor, limit: float | None) -> float:
    """The factor by which clipping to the limit multiplies gradients of this norm; 1 without a limit."""
    return 1.0 if limit is None or not float(norm) else min(1.0, limit / float(norm))


def _error_or_missing(state: Tensors, name: str, expected: Tensor, scale: float | Tensor) -> float:
    """The error of a weight or buffer; infinite if the plan's model does not have it."""
    return scaled_error(state[name], expected, scale) if name in state else math.inf
