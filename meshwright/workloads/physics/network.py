"""A network u(t, x) that returns its output together with derivatives of the output by the input."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from meshwright.errors import InputError


class SolutionNetwork(nn.Module):
    """Maps points (batch, 2), columns t and x, to a dict with the solution `u` (batch,). In training the dict also has
    the derivatives `u_t`, `u_x` and `u_xx` (batch,).

    The derivatives are computed by automatic differentiation in the forward pass, and a loss that uses them is
    differentiated a second time in the backward pass. Therefore the activation has to be smooth: it is tanh."""

    def __init__(self, hidden: Sequence[int] = (20,) * 8) -> None:
        super().__init__()
        if not hidden or any(width < 1 for width in hidden):
            raise InputError(f"the model's hidden is {list(hidden)}: write the widths of its layers, such as [64, 64]")
        layers = [layer for i, o in pairwise((2, *hidden)) for layer in (nn.Linear(i, o), nn.Tanh())]
        self.layers = nn.Sequential(*layers, nn.Linear(hidden[-1], 1))
        for layer in self.layers:
            if isinstance(layer, nn.Linear):  # as in the paper (Raissi et al. 2019): biases begin at zero
                nn.init.xavier_normal_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, points: Tensor) -> dict[str, Tensor]:
        if not self.training:
            return {"u": self.layers(points).squeeze(-1)}
        with torch.enable_grad():
            points = points.detach().requires_grad_()
            u = self.layers(points).squeeze(-1)
            u_t, u_x = _gradient(u, points).unbind(-1)
            u_xx = _gradient(u_x, points)[:, 1]
        return {"u": u, "u_t": u_t, "u_x": u_x, "u_xx": u_xx}


def _gradient(values: Tensor, points: Tensor) -> Tensor:
    """Returns the gradient (batch, 2) of each value by its point, which can be differentiated again."""
    # A value depends on its own point only. Therefore the gradient of the sum has the gradients of all values.
    (gradient,) = torch.autograd.grad(values.sum(), points, create_graph=True)
    return gradient
