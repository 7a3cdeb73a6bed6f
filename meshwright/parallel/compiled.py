"""Blocks compiled where they stand, under their own names: whatever wraps them or saves their weights sees no other.

Where that cannot be, the model runs as it is and one warning says why: a missing compiler costs speed, not the run.
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
    """From their next call on. A model without blocks is compiled as a whole."""
    if plan.compute.compile == "none":
        return
    why = _hindrance(plan, device.type)
    if why:
        warnings.warn(f"plan.compute.compile is {plan.compute.compile}, but {why}: running without", stacklevel=2)
        return
    options: dict[str, Any] = {"mode": _mode(plan, device.type)} if _mode(plan, device.type) else {}
    for block in [module.get_submodule(name) for name in find_blocks(module)] or [module]:
        block.compile(**options)


def _mode(plan: Plan, kind: str) -> str | None:
    """PyTorch's word for it, which has the CUDA graphs in it."""
    searches, graphs = plan.compute.compile == "max-autotune", plan.compute.cuda_graphs and kind == "cuda"
    if searches:
        return "max-autotune" if graphs else "max-autotune-no-cudagraphs"
    return "reduce-overhead" if graphs else None


def _hindrance(plan: Plan, kind: str) -> str | None:
    if plan.axes.tensor > 1 or plan.axes.pipeline > 1 or plan.modules.splits:
        return f"layers that are split or cut ({plan.summary()}) are not compiled yet"
    if kind == "cuda" and importlib.util.find_spec("triton") is None:
        return "there is no triton, which writes the kernels"
    names = ("g++", "clang++") if kind == "cpu" else ("cc", "gcc", "clang")
    if not any(map(shutil.which, names)):
        return f"there is no compiler ({' or '.join(names)})"
    return None
