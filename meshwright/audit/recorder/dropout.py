"""Turns dropout off: its masks depend on the layout, so two right trainings differ where it is on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .replaced import replace

_FUNCTIONS = (
    "dropout",
    "alpha_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_alpha_dropout",
)
_PATHS = {"DropPath": "drop_prob", "StochasticDepth": "p"}  # classes of libraries that drop whole branches


def turn_off_functions() -> None:
    """Functions of torch that drop out return their input."""
    functional = torch.nn.functional
    for name in _FUNCTIONS:
        replace(functional, name, _without_dropping())
    attention = functional.scaled_dot_product_attention

    def without_dropout(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if len(arguments) > 1:
            arguments = (arguments[0], 0.0, *arguments[2:])
        if "dropout_p" in options:
            options["dropout_p"] = 0.0
        return attention(query, key, value, *arguments, **options)

    replace(functional, "scaled_dot_product_attention", without_dropout)


def _without_dropping() -> Callable[..., Tensor]:
    """A function of its own for each one that it replaces."""

    def identity(input: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return input

    return identity


def turn_off_modules(roots: list[nn.Module]) -> None:
    """Modules that hand their rate to a kernel, or draw themselves, drop nothing."""
    for root in roots:
        for module in root.modules():
            if isinstance(module, nn.RNNBase):
                replace(module, "dropout", 0.0)
            for kind in type(module).__mro__:
                attribute = _PATHS.get(kind.__name__)
                if attribute and hasattr(module, attribute):
                    replace(module, attribute, 0.0)
