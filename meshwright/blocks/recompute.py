"""Activation recomputation: finds the blocks of a model that recompute their activations in the backward pass instead
of keeping them, and replaces their forward functions. Tracing (for predictions) and training both use this file,
therefore a prediction is about the blocks that really are recomputed.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.blocks.block_state import BlockState
from meshwright.blocks.borrowed_samples import borrowed_samples, is_borrowed
from meshwright.blocks.generation_cache import disable_generation_caches
from meshwright.blocks.module_names import is_inside
from meshwright.blocks.operator_kinds import operator_kind
from meshwright.blocks.power_iteration import power_iterations, without_power_iteration
from meshwright.errors import InputError

Recompute = Literal["none", "selective", "full"]
# Takes a block. Returns the context in which its first forward pass runs, and the one in which its recomputation runs.
PassContexts = Callable[[nn.Module], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
_SAVED_BY_SELECTIVE = ("matmul", "convolution", "attention")  # the kinds that take longest to recompute


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """The names of the blocks that are recomputed one by one: the outermost members of `ModuleList`s and `Sequential`s
    that have children and parameters. In a model without such members, the blocks are the model's direct children that
    have children and parameters. Empty if there are none of these either."""
    blocks: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and not any(is_inside(name, block) for block in blocks):
            prefix = f"{name}." if name else ""
            blocks += [f"{prefix}{key}" for key, child in module.named_children() if _is_block(child)]
    return tuple(blocks) or tuple(name for name, child in model.named_children() if _is_block(child))


def _is_block(module: nn.Module) -> bool:
    has_forward = not isinstance(module, nn.ModuleList | nn.ModuleDict)
    return has_forward and any(True for _ in module.children()) and any(True for _ in module.parameters())


def recompute_blocks(
    model: nn.Module,
    kind: Recompute,
    *,
    preserve_rng_state: bool = True,
    pass_contexts: PassContexts | None = None,
) -> None:
    """Replaces, in place, the forward function of every block (`find_blocks`) by one that recomputes the block's
    activations in the backward pass. With gradients disabled nothing is recomputed.

    `kind` "full" recomputes every operator of a block, "selective" all but matrix products, convolutions and attention,
    and "none" changes nothing. With `preserve_rng_state`, the recomputation draws the same dropout masks as the first
    pass. `pass_contexts` gives the contexts in which a block's first forward pass and its recomputation run.
    """
    if kind == "none":
        return
    names = find_blocks(model)
    if not names:
        raise InputError(f"memory.recompute is {kind}, but {type(model).__name__} has no blocks to recompute")
    disable_generation_caches(model)
    for name in names:
        block = model.get_submodule(name)
        block.forward = _recomputing_forward(name, block, kind, preserve_rng_state, pass_contexts)


def _recomputing_forward(
    name: str, block: nn.Module, kind: Recompute, preserve_rng_state: bool, pass_contexts: PassContexts | None
) -> Callable[..., Any]:
    original_forward = block.forward
    state = BlockState(name, block)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        record = state.new_record()
        # A trace is about costs only, and copies would be counted.
        first, second = pass_contexts(block) if pass_contexts else (state.record(record), nullcontext())
        # Stages of a pipeline recompute a microbatch when others have run.
        borrowed = any(map(is_borrowed, block.modules()))

        def frozen() -> tuple[AbstractContextManager[Any], ...]:
            # The record has the number of power iterations too, which is 0 in a recomputation.
            return (record.replayed(), _frozen_statistics(block), *((borrowed_samples(block),) if borrowed else ()))

        if kind == "full":
            return first, _Nested(lambda: (second, *frozen()))
        caching, cached = _selective_contexts()
        return (
            _Nested(lambda: (first, caching)),
            _Nested(lambda: (second, *frozen(), cached)),
        )

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original_forward(*args, **kwargs)
        settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
        # Compiled code updates buffers once, at its end, therefore nothing has to freeze statistics. The compiler can
        # trace no other contexts than those of selective recomputation.
        if not torch.compiler.is_compiling():
            settings["context_fn"] = contexts
        elif kind == "selective":
            settings["context_fn"] = _selective_contexts
        return checkpoint(original_forward, *args, **settings, **kwargs)

    return forward


def _selective_policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_saved = operator_kind(func) in _SAVED_BY_SELECTIVE
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


_selective_contexts = partial(create_selective_checkpoint_contexts, _selective_policy)


class _Nested(AbstractContextManager[None]):
    """Several contexts as one, which `make` creates each time it is entered: if a model differentiates its output in
    the forward pass, its blocks are recomputed there and again in the backward pass."""

    def __init__(self, make: Callable[[], tuple[AbstractContextManager[Any], ...]]) -> None:
        self._make = make
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._make():
                stack.enter_context(context)
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


@contextmanager
def _frozen_statistics(block: nn.Module) -> Iterator[None]:
    """Keeps the BatchNorm layers of a block from updating their running statistics, and spectral norms from power
    iteration. The recomputation runs in this context, because the first forward pass has already done both."""
    norms = [m for m in block.modules() if isinstance(m, _BatchNorm) and m.training and m.track_running_stats]
    settings = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        with without_power_iteration(power_iterations(block)):
            yield
    finally:
        for norm, (momentum, count) in zip(norms, settings, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
