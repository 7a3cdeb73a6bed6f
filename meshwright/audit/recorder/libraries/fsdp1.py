"""Listens to the clipping of FSDP1, which has a method of its own for it."""

import functools
from types import ModuleType
from typing import Any

from ..recorder import recorder
from ..replaced import replace


def after_import(module: ModuleType) -> None:
    """Called when torch's `fully_sharded_data_parallel` was imported."""
    kind = module.FullyShardedDataParallel
    original = kind.clip_grad_norm_

    @functools.wraps(original)
    def clip(model: Any, max_norm: Any, *arguments: Any, **named: Any) -> Any:
        own = recorder()
        if not own.is_recording:
            return original(model, max_norm, *arguments, **named)
        names = own.before_clipping(list(model.parameters()))
        result = original(model, max_norm, *arguments, **named)
        own.norm(result, float(max_norm), names)
        return result

    replace(kind, "clip_grad_norm_", clip)
