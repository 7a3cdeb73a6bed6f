"""How far two right trainings may differ: measured by a third one, and never set by hand for a model.

The reference is run once more from weights that are changed by about one rounding of the type it computes in (the noise
run). What changes then is what rounding can change in this model, this data and this layer. With R the reference's
tensor, N the noise run's, and eps that of the shortest type either side computes in:

(1) Each element may differ by

        S · max(n, rms(N - R)) + 2 · eps · r + 16 · eps₃₂ · max|R|                              → `element_bounds`

    where n is the largest |N - R| in the element's row or in its column, whichever is smaller, and r is the same of
    |R|. A vector has no rows: there n is the largest of all its elements.
(2) A row may be longer or shorter than the reference's by a share of at most

        S' · max(rms over rows of |a(N)|, c · ‖N - R‖ / ‖R‖) + eps / 2 + 1e-6                    → `row_bounds`

    where a(X) = ⟨X - R, R⟩ / ⟨R, R⟩, the second norms are those of the row, and S' is 6, and 3 for types shorter than
    fp32. Roundings cancel in the sum over a row as far as those of different samples do, a wrong factor does not: c is
    the rms of a(N) divided by that of ‖N - R‖ / ‖R‖, over all rows. Rows whose gradient is rounding only,
    ‖R‖ ≤ S · ‖N - R‖, are left out. This counts in the first step only: later, a row may follow another sign of a ReLU.
(3) S is 8, and 5 for types shorter than fp32: there the roundings of values dominate, which the noise run has; with
    fp32, sums in another order do. In step k it is k · D times as large: the candidate starts from weights that differ
    from the reference's by rounding, as those of the noise run do, and D says how many times as much. → `drift_factor`
(4) An optimizer such as Adam makes whole steps of gradients that are rounding only. Where a gradient g may differ by b
    by (1), the change of the weight since the start, u, may differ by min(1, 4 · b / |g|) · 2 · max|u|, with the
    largest b / |g| of the steps so far.                                                             → `weight_bounds`
(5) Without a noise run, n is κ · eps · max(r, 0.3 · m), with m the largest root mean square of a gradient of the same
    module: a tensor that is zero in exact arithmetic consists of rounding of the others' size. A row may then be
    longer by a share of 3 · κ · eps. D is the weights' relative distance divided by that of a noise run's, and at least
    4. κ is 8, and 1 for types shorter than fp32. Right trainings of decoders with 2 and 12 blocks stayed below 0.6 of
    this; where rounding has more effect than there, only a noise run shows it.                      → `assumed_noise`
(6) Of a large tensor, sums over blocks of w elements are compared, and a few elements of each row (`sketches.py`). With
    p the mean of min(1, 4 · b / |g|) over those elements, whole steps may differ in p · w + 3 · √(p · w) + 2 elements
    of a block, by 2 · max|u| each. Faults of an update that are smaller are seen in the single elements.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_SAFETY, _SAFETY_OF_SHORT_TYPES = 8.0, 5.0
_ROW_SAFETY, _ROW_SAFETY_OF_SHORT_TYPES = 6.0, 3.0
_EPS32 = 2.0**-23
_ASSUMED, _ASSUMED_OF_SHORT_TYPES = 8.0, 1.0  # κ of equation (5)
_SHARE_OF_MODULE = 0.3
SMALLEST_ASSUMED_DRIFT = 4.0


@dataclass(frozen=True)
class Rounding:
    """`eps` is that of the shortest type that either side computes in; `factor` is k · D of equation (3)."""

    eps: float
    factor: float = 1.0

    @property
    def safety(self) -> float:
        return self.factor * (_SAFETY if self.eps <= _EPS32 else _SAFETY_OF_SHORT_TYPES)

    @property
    def assumed(self) -> float:
        """κ · eps of equation (5)."""
        return self.eps * (_ASSUMED if self.eps <= _EPS32 else _ASSUMED_OF_SHORT_TYPES)

    def assumed_noise(self, reference: Tensor, module_scale: float) -> Tensor:
        """Equation (5): the n of equation (1) of each element. `module_scale` is m."""
        return self.assumed * smallest_slice(reference, of_vectors=True).clamp(min=_SHARE_OF_MODULE * module_scale)

    def element_bounds(self, reference: Tensor, noise: Tensor | None, module_scale: float = 0.0) -> Tensor:
        """Equation (1), or (5) without a noise run. Both tensors are in fp64."""
        bounds = 2 * self.eps * smallest_slice(reference, of_vectors=False)
        bounds = bounds + 16 * _EPS32 * _largest(reference)
        if noise is not None:
            change = (noise - reference).nan_to_num(0.0)
            usual = math.sqrt(float(change.square().mean())) if change.numel() else 0.0
            return bounds + self.safety * smallest_slice(change, of_vectors=True).clamp(min=usual)
        return bounds + self.safety * self.assumed_noise(reference, module_scale)

    def row_bounds(self, reference: Tensor, noise: Tensor | None, module_scale: float = 0.0) -> Tensor:
        """Equation (2), for each row; infinite for rows whose gradient is rounding only."""
        sizes = _row_norms(reference)
        fixed = self.eps / 2 + 1e-6
        if noise is None:
            counted = sizes > self.safety * _row_norms(self.assumed_noise(reference, module_scale))
            return torch.where(counted, _ROW_SAFETY * self.assumed + fixed, math.inf)
        changes = _row_norms((noise - reference).nan_to_num(0.0))
        counted = sizes > self.safety * changes
        shares = row_shares(noise, reference)[counted]
        usual = math.sqrt(float(shares.square().mean())) if shares.numel() else 0.0
        safety = _ROW_SAFETY if self.eps <= _EPS32 else _ROW_SAFETY_OF_SHORT_TYPES
        relative = changes / sizes
        all_of = math.sqrt(float(relative[counted].square().mean())) if shares.numel() else 0.0
        along = min(1.0, usual / all_of) if all_of else 1.0
        return torch.where(counted, safety * (along * relative).clamp(min=usual) + fixed, math.inf)


def smallest_slice(tensor: Tensor, of_vectors: bool) -> Tensor:
    """For each element, the smallest over all dimensions of the largest absolute value in the slice that holds the
    element. Of a vector it is the largest of all elements if `of_vectors`, otherwise the element itself."""
    magnitudes = tensor.abs().nan_to_num(0.0, posinf=0.0)
    if not tensor.numel():
        return magnitudes
    if tensor.dim() < 2:
        return magnitudes.amax().expand_as(magnitudes) if of_vectors and tensor.dim() else magnitudes
    result: Tensor | None = None
    for dim in range(tensor.dim()):
        largest = magnitudes.amax([other for other in range(tensor.dim()) if other != dim], keepdim=True)
        result = largest if result is None else torch.minimum(result, largest)
    assert result is not None
    return result.expand_as(magnitudes)


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor as a matrix of its rows along the first dimension. A vector is one row."""
    if tensor.dim() < 2 or not tensor.numel():
        return tensor.reshape(1, -1)
    return tensor.reshape(tensor.shape[0], -1)


def row_shares(value: Tensor, reference: Tensor) -> Tensor:
    """The share by which each row is longer than the reference's; not a number for rows of zeros."""
    rows = as_rows(reference)
    return ((as_rows(value) - rows) * rows).sum(1) / rows.square().sum(1)


def _row_norms(tensor: Tensor) -> Tensor:
    return as_rows(tensor).square().sum(1).sqrt()


def drift_factor(candidate: float, noise: float, smallest: float = 1.0) -> float:
    """Equation (3), from the root mean square distances of both runs' weights to the reference's."""
    if not noise or not math.isfinite(candidate):
        return smallest
    return max(smallest, candidate / noise)


def weight_bounds(
    change: Tensor, bounds: Tensor, uncertainty: Tensor | None, blocks: int = 0, width: float = 1.0
) -> Tensor:
    """Equation (4): `bounds` are those of equation (1) of the weights, `uncertainty` is the largest b / |g|. The first
    `blocks` columns are sums over `width` elements each, for which equation (6) holds."""
    if uncertainty is None or not change.numel():
        return bounds
    shares = (4 * uncertainty).clamp(max=1.0)
    moved = 2 * _largest(change[:, blocks:] if blocks else change)
    bounds = bounds + shares * moved
    if blocks:
        count = width * float(shares[:, blocks:].mean())
        bounds[:, :blocks] += moved * (count + 3 * math.sqrt(count) + 2)
    return bounds


def perturbation(eps: float) -> float:
    """The relative change of the noise run's weights. In fp32, half an eps would leave many weights as they are."""
    return eps if eps <= _EPS32 else eps / 2


def eps_of(dtypes: set[str]) -> float:
    """The eps of the shortest floating-point type among names such as bfloat16."""
    found = [getattr(torch, name, None) for name in dtypes]
    return max(
        (torch.finfo(dtype).eps for dtype in found if dtype is not None and dtype.is_floating_point), default=_EPS32
    )


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().nan_to_num(0.0, posinf=0.0).max()) if tensor.numel() else 0.0
