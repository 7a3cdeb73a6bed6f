"""Compiles a model with `torch.compile`: its blocks one by one, or the whole model together with the loss function.
Modules and parameter names stay the same, therefore wrappers and checkpoints are not affected.

If nothing can be compiled, the model runs uncompiled and a warning says why.
"""

import importlib.util
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.blocks.recompute import find_blocks
from meshwright.parallel.torch_private import compiler_errors
from meshwright.plan import Plan


@dataclass
class Compilation:
    """What of a model is compiled: `blocks`, which were compiled in place, or with `whole` the function that `function`
    returns. `mode` is the argument of `torch.compile`, None for its default."""

    blocks: list[nn.Module] = field(default_factory=list)
    whole: bool = False
    mode: str | None = None

    def function(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that compiles `forward` when it is called for the first time."""
        return torch.compile(forward, mode=self.mode)

    def turn_off(self, error: Exception) -> None:
        """Makes the model run uncompiled from now on, and warns that compiling failed with this error."""
        for block in self.blocks:
            block._compiled_call_impl = None
        self.blocks, self.whole = [], False
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = " ".join(lines[:2])  # the first line may only name the backend
        warnings.warn(f"plan.compute.compile: compiling failed ({reason}), running without", stacklevel=2)

    @property
    def is_on(self) -> bool:
        return self.whole or bool(self.blocks)


def is_compile_error(error: Exception) -> bool:
    """Whether the compiler has raised the error, and not the code that it compiles."""
    return isinstance(error, compiler_errors())


def compile_model(module: nn.Module, plan: Plan, device: torch.device) -> Compilation:
    """Sets the model or its blocks up to be compiled at their next call. A model without blocks is compiled as a whole.
    The blocks of a sharded model are compiled one by one, because FSDP2 gathers their weights between them."""
    if plan.compute.compile == "none":
        return Compilation()
    reason = _reason_not_to_compile(plan, device.type)
    if reason:
        warnings.warn(f"plan.compute.compile is {plan.compute.compile}, but {reason}: running without", stacklevel=2)
        return Compilation()
    mode = _mode(plan, device.type)
    blocks = [module.get_submodule(name) for name in find_blocks(module)]
    if plan.axes.shard == 1 and (plan.compute.compile == "model" or not blocks):
        return Compilation(whole=True, mode=mode)
    for block in blocks or [module]:
        block.compile(**({"mode": mode} if mode else {}))
    return Compilation(blocks or [module], mode=mode)


def _mode(plan: Plan, device_type: str) -> str | None:
    """The `mode` argument of `torch.compile`, which also decides whether the compiled code uses CUDA graphs of its own;
    None for the default. It does with several ranks only: on a single rank the whole step is captured as one graph
    (train/step/cuda_graphs.py)."""
    uses_own_graphs = plan.compute.cuda_graphs and device_type == "cuda" and plan.processes > 1
    if plan.compute.compile_mode == "max-autotune":
        return "max-autotune" if uses_own_graphs else "max-autotune-no-cudagraphs"
    return "reduce-overhead" if uses_own_graphs else None


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
