"""Burgers' equation in one dimension, the usual first problem of physics-informed networks (Raissi et al. 2019,
doi:10.1016/j.jcp.2018.10.045). A network u(t, x) is trained so that it fulfils, with the viscosity ν,

    ∂u/∂t + u ∂u/∂x = ν ∂²u/∂x²        for 0 < t ≤ 1 and −1 < x < 1       the residual in `BurgersLoss`
    u(0, x) = −sin(πx)                  at the initial time                 `initial_value`
    u(t, −1) = u(t, 1) = 0              at the boundary

The solution is known as a quotient of two integrals (Basdevant et al. 1986), `exact_solution`, so that the error of a
trained network can be measured.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.errors import InputError

VISCOSITY = 0.01 / math.pi  # that of the paper
EQUATION, VALUE = 0, 1  # kinds of points: those where the equation holds, and those where the solution is known
_NODES = 100  # of the quadrature: the solution for this viscosity then has an error below 1e-6


class BurgersLoss(nn.Module):
    """The mean over points of the squared residual of the equation, at points of the kind `EQUATION`, or of the squared
    error multiplied by `value_weight`, at points of the kind `VALUE`. A target is (kind of the point, known value).

    The model's output has the solution `u` (batch,) and, if any point is of the kind `EQUATION`, its derivatives `u_t`,
    `u_x` and `u_xx`. In evaluation the model returns no derivatives; then points of this kind raise an
    `InputError`."""

    def __init__(self, viscosity: float = VISCOSITY, value_weight: float = 1.0) -> None:
        super().__init__()
        _check_viscosity(viscosity)
        self.viscosity = viscosity
        self.value_weight = value_weight

    def forward(self, output: Mapping[str, Tensor], target: Tensor) -> Tensor:
        kind, value = target.unbind(-1)
        errors = self.value_weight * (output["u"] - value).square()
        if "u_xx" not in output:
            if (kind == EQUATION).any():
                raise InputError(
                    f"points for evaluation are of the kind {VALUE}, but some are of the kind {EQUATION}: give each the"
                    " known value of the solution, or leave it out"
                )
            return errors.mean()
        residual = output["u_t"] + output["u"] * output["u_x"] - self.viscosity * output["u_xx"]
        return torch.where(kind == EQUATION, residual.square(), errors).mean()


class RelativeError:
    """The L2 norm of the error over all points whose value is known, divided by the L2 norm of the values."""

    def __call__(self, output: Mapping[str, Tensor], target: Tensor) -> Tensor:
        """Returns the sums of the squared errors and of the squared values over a batch."""
        kind, value = target.unbind(-1)
        is_known = kind == VALUE
        squares = torch.stack([(output["u"] - value).square(), value.square()])
        return torch.where(is_known, squares, 0).double().sum(-1)

    def finish(self, total: Tensor) -> float:
        """Returns the relative error of the sums over all batches."""
        errors, values = total.tolist()
        return math.sqrt(errors / values)


def initial_value(x: np.ndarray) -> np.ndarray:
    """Returns u(0, x)."""
    return -np.sin(np.pi * x)


def exact_solution(t: np.ndarray, x: np.ndarray, viscosity: float = VISCOSITY) -> np.ndarray:
    """Returns the solution u(t, x) at these points, in fp64. Gauss-Hermite quadrature computes both integrals."""
    _check_viscosity(viscosity)
    nodes, weights = np.polynomial.hermite.hermgauss(_NODES)
    y = x[..., None] - np.sqrt(4 * viscosity * t)[..., None] * nodes
    # Of the factor exp(-cos(πy) / 2πν), which may be too large for a float, only ratios matter.
    exponent = -np.cos(np.pi * y) / (2 * np.pi * viscosity)
    factors = weights * np.exp(exponent - exponent.max(-1, keepdims=True))
    return -(np.sin(np.pi * y) * factors).sum(-1) / factors.sum(-1)


def _check_viscosity(viscosity: float) -> None:
    if viscosity <= 0:
        raise InputError(f"viscosity is {viscosity}: write a number above 0; the usual one is 0.01 / π = 0.00318")
