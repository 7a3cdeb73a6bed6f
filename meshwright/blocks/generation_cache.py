"""Switches off what models keep for generating text, which no training step needs."""

from typing import Any

from torch import nn


def disable_generation_caches(model: nn.Module) -> None:
    """Switches off the key and value caches of `transformers` models, in place. A block that is recomputed would put
    its keys and values into the cache twice."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
