"""Spectral normalization under plans that run several forward passes in one step.

`torch.nn.utils.parametrizations.spectral_norm` and `torch.nn.utils.spectral_norm` improve two vectors, which are
buffers, by power iteration in every forward pass in training mode. One device runs one forward pass in a step.
Microbatches and recomputation add more of them, so power iteration is switched off there: the vectors are then those of
one device, and all passes of a step use the same weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm


def power_iterations(model: nn.Module) -> list[Any]:
    """Returns the objects in a model that improve a spectral norm by power iteration: parametrizations, which are
    modules, and the hooks of `torch.nn.utils.spectral_norm`."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    modules = [module for module in model.modules() if isinstance(getattr(module, "n_power_iterations", None), int)]
    return modules + [hook for hook in hooks if isinstance(hook, SpectralNorm)]


@contextmanager
def without_power_iteration(iterations: Sequence[Any]) -> Iterator[None]:
    """Within this context, the objects that `power_iterations` has returned use their vectors as they are."""
    counts = [iteration.n_power_iterations for iteration in iterations]
    for iteration in iterations:
        iteration.n_power_iterations = 0
    try:
        yield
    finally:
        for iteration, count in zip(iterations, counts, strict=True):
            iteration.n_power_iterations = count
