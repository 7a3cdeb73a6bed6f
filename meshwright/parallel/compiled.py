"""Compiles the blocks of a model in place with `torch.compile`. Modules and parameter names stay the same, therefore
wrappers and checkpoints are not affected.

If the blocks cannot be compiled, the model runs uncompiled and a warning says why.
"""

import importlib.util
import shutil
import warnings
from typing import Any

import torch
from torch import nn

from meshwright.blocks.recompute import find_blocks
from meshwright.plan import Plan


def compile_blocks(module: nn.Module, plan: Plan, device: torch.device) -> None:
    """Sets the blocks up to be compiled at their next call. A model without blocks is compiled as a whole."""
    if plan.compute.compile == "none":
        return
    reason = _reason_not_to_compile(plan, device.type)
    if reason:
        warnings.warn(f"plan.compute.compile is {plan.compute.compile}, but {reason}: running without", stacklevel=2)
        return
    options: dict[str, Any] = {"mode": _mode(plan, device.type)} if _mode(plan, device.type) else {}
    for block in [module.get_submodule(name) for name in find_blocks(module)] or [module]:
        block.compile(**options)


def _mode(plan: Plan, device_type: str) -> str | None:
    """The `mode` argument of `torch.compile`, which also decides whether CUDA graphs are used; None for the default."""
    uses_graphs = plan.compute.cuda_graphs and device_type == "cuda"
    if plan.compute.compile == "max-autotune":
        return "max-autotune" if uses_graphs else "max-autotune-no-cudagraphs"
    return "reduce-overhead" if uses_graphs else None


def _reason_not_to_compile(plan: Plan, device_type: str) -> str | None:
    """Returns why the blocks cannot be compiled, or None if they can."""
    if plan.axes.tensor > 1 or plan.axes.pipeline > 1 or plan.modules.splits:
        return f"layers that are split or cut ({plan.summary()}) are not compiled yet"
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        return "there is no triton, which writes the kernels"
    compilers = ("g++", "clang++") if device_type == "cpu" else ("cc", "gcc", "clang")
    if not any(map(shutil.which, compilers)):
        return f"there is no compiler ({' or '.join(compilers)})"
    return None
