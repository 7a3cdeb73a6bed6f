"""Compares what ranks have trained with plain PyTorch. It shares no code with the package's own proofs."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from validation.fuzz.training.plain import Training

TOLERANCE = 1e-9  # in fp64, relative to the largest value of a row of the tensor


def difference(expected: Training, losses: tuple[float, ...], state: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference, and where it is. Infinite if something is missing or has another shape."""
    worst = (0.0, "")
    if len(losses) != len(expected.losses):
        return math.inf, f"{len(losses)} losses instead of {len(expected.losses)}"
    scale = max(map(abs, expected.losses))
    for step, (value, loss) in enumerate(zip(losses, expected.losses, strict=True)):
        worst = max(worst, (_relative(abs(value - loss), scale), f"the loss of step {step}"))
    if set(state) != set(expected.state):
        return math.inf, f"other names: {sorted(set(state) ^ set(expected.state))}"
    for name, wanted in expected.state.items():
        found = state[name]
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            return math.inf, f"{name} is {found.dtype} {tuple(found.shape)}"
        places = expected.rounding_only.get(name)
        if places is not None:
            found = torch.where(places, wanted, found)
        worst = max(worst, (_tensor_difference(found, wanted), name))
    return worst


def _tensor_difference(found: Tensor, wanted: Tensor) -> float:
    """By rows: a wrong row that is much smaller than the others counts, too."""
    if not wanted.numel():
        return 0.0
    found, wanted = (torch.view_as_real(value) if value.is_complex() else value for value in (found, wanted))
    found, wanted = found.double(), wanted.double()
    rows = (lambda value: value.flatten(1)) if wanted.dim() > 1 else (lambda value: value.reshape(1, -1))
    errors = rows((found - wanted).abs()).amax(1)
    scales = rows(wanted.abs()).amax(1)
    floor = 1e-3 * wanted.abs().max()
    ratios = errors / torch.maximum(scales, floor).clamp(min=1e-12)
    largest = ratios.max().item()
    return largest if math.isfinite(largest) else math.inf


def _relative(error: float, scale: float) -> float:
    return error / max(scale, 1e-12) if math.isfinite(error) else math.inf
