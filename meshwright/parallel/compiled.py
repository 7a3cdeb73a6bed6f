"""Compiles a model with `torch.compile`, in parts that no other step of parallel/apply.py has to look into:

    plan                          compiled
    one rank                      with `model` the model together with the loss function, if the compiler can trace
                                  both as one graph, otherwise the model, and the loss function; with `blocks` each
                                  block
    replicate                     with `model` the model, and the loss function; with `blocks` each block
    shard                         each block, because FSDP2 gathers the weights of blocks between them
    pipeline                      with `model` each stage, and the loss function; with `blocks` each block of a stage
    tensor                        each block, between the collectives inside of it (tensor/compiled_blocks.py)

A model without blocks is compiled as a whole. `forward` functions of modules are replaced, so parameter names, hooks
and checkpoints stay as they are. What cannot be compiled runs uncompiled, and one warning says why: on one rank of each
pipeline stage, because the others run the same code. If a rank has no compiler, no rank compiles anything.
"""

import importlib.util
import logging
import shutil
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.blocks.compiler_settings import COMPILER_SETTINGS, WHOLE_ACROSS_DDP_BUCKETS
from meshwright.blocks.failed_module import where_it_failed
from meshwright.blocks.recompute import find_blocks
from meshwright.messages.exchange import all_gather_values
from meshwright.parallel.pipeline.compiled_stage import CompiledStage
from meshwright.parallel.pipeline.remote_modules import RemoteModule, RemoteTensorError
from meshwright.parallel.pipeline.stage import Stage
from meshwright.parallel.tensor.compiled_blocks import SplitBlocks, has_split_layers, reason_not_to_compile
from meshwright.parallel.tensor.local_graph import CannotRecord
from meshwright.parallel.torch_private import (
    as_one_graph,
    compiler_errors,
    cpp_compilers,
    graph_breaks,
    is_backward_error_of_compiled_code,
    was_compiling,
)
from meshwright.plan import Plan

_LOG = logging.getLogger(__name__)


@dataclass
class Compilation:
    """What of a model is compiled: the functions in `parts`, whose names are those of their modules; with `loss` the
    loss function by itself; or with `whole` the model together with the loss function, with `apart` as two functions.
    `mode` is the argument of `torch.compile`, None for its default. If `warns` is False, warnings are only logged,
    because another rank gives them."""

    parts: list[str] = field(default_factory=list)
    loss: bool = False
    whole: bool = False
    apart: bool = False
    mode: str | None = None
    warns: bool = True
    _shapes: Hashable = None
    _breaks: dict[str, int] = field(default_factory=graph_breaks)
    _given: set[str] = field(default_factory=set)  # the kinds of warnings that were given

    def function(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that compiles `forward` when it is called for the first time."""
        return torch.compile(forward, mode=self.mode)

    def fall_back(self, error: Exception, where: str = "") -> None:
        """Chooses what is compiled from now on instead of what could not be compiled because of this error: a model and
        its loss function apart instead of together, and otherwise nothing. `where` is the text about the module."""
        if not self.whole or self.apart:
            self.turn_off(error, where)
            return
        self.apart = True
        _LOG.info("plan.compute.compile: the model and its loss are compiled apart, because of %s", _first_lines(error))

    def may_compile(self, shapes: Hashable) -> bool:
        """Whether something may be compiled in a step whose batch has these shapes."""
        return self.is_on and self._shapes != shapes

    def turn_off(self, error: Exception, where: str = "") -> None:
        """Makes the model run uncompiled from now on, and warns that compiling failed with this error. `where` is the
        text about the module."""
        self.parts, self.loss, self.whole = [], False, False
        self.warn(f"compiling failed{where} ({_first_lines(error)}), running without")

    def check_step(self, shapes: Hashable) -> None:
        """Warns once if batches have different shapes, and once if the compiler could not trace a function as a whole.
        `shapes` are those of the batch of the step that was run. Nothing is compiled in a step with the shapes of the
        step before."""
        if self._shapes == shapes:
            return
        if self._shapes is not None:
            self._warn_once("shapes", "batches have different shapes, so the model is compiled again for any shape")
        self._shapes = shapes
        breaks = graph_breaks()
        reason = next((reason for reason in breaks if breaks[reason] != self._breaks.get(reason)), None)
        if reason is not None:
            short = (reason.strip().splitlines() or ["unknown reason"])[0]
            self._warn_once("breaks", f"the compiler cannot trace all of the model ({short}), it is compiled in parts")

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._given:
            self._given.add(kind)
            self.warn(text)

    def warn(self, text: str) -> None:
        if self.warns:
            warnings.warn(f"plan.compute.compile: {text}", stacklevel=2)
        else:
            _LOG.info("plan.compute.compile: %s", text)

    @property
    def is_on(self) -> bool:
        return self.whole or self.loss or bool(self.parts)


class OneGraph:
    """Calls a function that is compiled as one graph. It runs uncompiled if the compiler cannot do that."""

    def __init__(self, function: Callable[..., Any], compilation: Compilation) -> None:
        self._original = function
        self._compiled = compilation.function(function)
        self._is_compiled = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_compiled:
            try:
                with as_one_graph():
                    return self._compiled(*args, **kwargs)
            except Exception as error:
                if not is_compile_error(error):
                    raise
                self._is_compiled = False
        return self._original(*args, **kwargs)


class CompiledForward:
    """Takes the place of a `forward` function: calls the compiled one, or the original one if it cannot be compiled.
    With `only_in_training` the original one is called as well where no gradients are needed, because an evaluation
    would compile the whole model once more."""

    def __init__(
        self,
        original: Callable[..., Any],
        compiled: Callable[..., Any],
        compilation: Compilation,
        *,
        only_in_training: bool = False,
    ) -> None:
        self._original = original
        self._compiled = compiled
        self._compilation = compilation
        self._only_in_training = only_in_training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runs_compiled = self._compilation.is_on and (torch.is_grad_enabled() or not self._only_in_training)
        if runs_compiled:
            try:
                return self._compiled(*args, **kwargs)
            except Exception as error:
                if not is_compile_error(error):
                    raise
                owner = getattr(self._original, "__self__", None)
                self._compilation.turn_off(error, where_it_failed(error, owner) if isinstance(owner, nn.Module) else "")
        return self._original(*args, **kwargs)


def _first_lines(error: Exception) -> str:
    """The first lines of an error's text, as one line. The first may only name the backend."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2])


def is_compile_error(error: Exception) -> bool:
    """Whether the compiler has raised the error, and not the code that it compiles."""
    refusals: tuple[type[Exception], ...] = (RemoteTensorError, CannotRecord, *compiler_errors())
    return isinstance(error, refusals) or was_compiling(error) or is_backward_error_of_compiled_code(error)


def compile_model(
    module: nn.Module, plan: Plan, device: torch.device, stages: Sequence[Stage] = (), *, warns: bool = True
) -> Compilation:
    """Sets the model or its blocks up to be compiled at their next call. `module` is this rank's part of the model, and
    `stages` are its pipeline stages. If `warns` is False, another rank gives the same warnings. All ranks call this
    together."""
    if plan.compute.compile == "none":
        return Compilation()
    compilation = Compilation(mode=_mode(plan, device.type), warns=warns)
    own_reason = _reason_not_to_compile(plan, device.type)
    # Workers of parameter servers have no process group of their own.
    reasons = [own_reason] if plan.gradients.servers else all_gather_values(own_reason)
    rank, reason = next(((rank, reason) for rank, reason in enumerate(reasons) if reason), (0, None))
    if reason:
        where = "" if all(reasons) else f" on rank {rank}"
        if not dist.is_initialized() or dist.get_rank() == 0:
            compilation.warn(f"nothing is compiled, because {reason}{where}")
        return Compilation()
    COMPILER_SETTINGS.make_for(compilation)
    blocks = [name for name in find_blocks(module) if _is_complete(module.get_submodule(name))]
    if plan.axes.tensor > 1:
        _compile_split_model(module, blocks, compilation)
        return compilation
    recomputes_in_ddp = plan.memory.recompute != "none" and plan.world_size == plan.axes.replicate > 1
    if recomputes_in_ddp:  # DDP sends the gradients of a block while the blocks before it run their backward passes
        WHOLE_ACROSS_DDP_BUCKETS.make_for(compilation)
    whole_model = plan.compute.compile == "model" and plan.axes.shard == 1 and not recomputes_in_ddp
    as_a_whole = whole_model or not blocks
    if as_a_whole and plan.world_size == 1:
        compilation.whole = True
        return compilation
    compilation.loss = as_a_whole
    if as_a_whole and stages:
        for stage in stages:
            compiled = CompiledStage(stage, compilation.function)
            stage.compute = CompiledForward(stage.run_model, compiled, compilation, only_in_training=True)
            compilation.parts.append(f"stage {stage.index}")
        return compilation
    for name in [""] if as_a_whole else blocks:
        block = module.get_submodule(name)
        _replace_forward(block, name, compilation.function(block.forward), compilation)
    return compilation


def _compile_split_model(module: nn.Module, blocks: Sequence[str], compilation: Compilation) -> None:
    """Compiles the blocks of a model whose layers are split over the tensor axis."""
    split_blocks = SplitBlocks(compilation.function)
    reasons = dict.fromkeys(reason_not_to_compile(module.get_submodule(name)) for name in blocks)
    reason = next((reason for reason in reasons if reason), None if blocks else "it has no blocks")
    if reason:
        compilation.warn(f"not all of the model is compiled, because {reason}")
    for name in blocks:
        block = module.get_submodule(name)
        if reason_not_to_compile(block) is None:
            function = split_blocks.function(block) if has_split_layers(block) else compilation.function(block.forward)
            _replace_forward(block, name, function, compilation)


def _replace_forward(module: nn.Module, name: str, compiled: Callable[..., Any], compilation: Compilation) -> None:
    module.forward = CompiledForward(module.forward, compiled, compilation, only_in_training=not name)
    compilation.parts.append(name)


def _is_complete(block: nn.Module) -> bool:
    """Whether all of the block runs in this rank's pipeline stages."""
    return not any(isinstance(module, RemoteModule) for module in block.modules())


def _mode(plan: Plan, device_type: str) -> str | None:
    """The `mode` argument of `torch.compile`, which also decides whether the compiled code uses CUDA graphs of its own;
    None for the default. It does with several ranks only: on a single rank the whole step is captured as one graph
    (train/step/cuda_graphs.py). Pipelines and split layers use none (plan_rules/compute.py)."""
    uses_own_graphs = plan.compute.cuda_graphs and device_type == "cuda" and plan.processes > 1
    if plan.compute.compile_mode == "max-autotune":
        return "max-autotune" if uses_own_graphs else "max-autotune-no-cudagraphs"
    return "reduce-overhead" if uses_own_graphs else None


def _reason_not_to_compile(plan: Plan, device_type: str) -> str | None:
    """Returns why the blocks cannot be compiled, or None if they can."""
    if plan.compile_obstacle:
        return plan.compile_obstacle
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        return "there is no triton, which writes the kernels"
    compilers = cpp_compilers() if device_type == "cpu" else ("cc", "gcc", "clang")
    if not any(map(shutil.which, compilers)):
        return f"there is no compiler ({' or '.join(compilers)})"
    return None
