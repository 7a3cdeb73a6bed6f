"""Switches mixtures of experts of the transformers library to their eager form, for comparisons in fp64."""

from typing import Any

from torch import nn


def use_eager_experts(model: nn.Module) -> bool:
    """Makes mixtures of experts in the model compute one expert after the other, in place, because the grouped product
    that they use otherwise has no fp64. Returns whether anything changed."""
    changed = False
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        implementation = getattr(config, "_experts_implementation", None)
        if implementation in (None, "eager") or not hasattr(module, "set_experts_implementation"):
            continue
        try:
            module.set_experts_implementation("eager")  # type: ignore[operator]
        except ValueError:  # the model has no experts
            continue
        changed = changed or _has_experts(module)
    return changed


def _has_experts(model: nn.Module) -> bool:
    return any("experts" in type(module).__name__.lower() for module in model.modules())
