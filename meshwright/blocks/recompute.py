"""Blocks whose activations are computed again in the backward pass instead of being kept: which they are, and how a
model is told to. Tracing and training do it here alike, so what is predicted is what runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.blocks.module_names import within
from meshwright.blocks.operator_kinds import kind_of
from meshwright.errors import InputError

Recompute = Literal["none", "selective", "full"]
Around = Callable[[nn.Module], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
_KEPT = ("matmul", "convolution", "attention")  # by `selective`: they cost the most to compute again


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """The outermost members of lists and sequences that are made of several modules; in a model without any, its
    own children that are."""
    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and not any(within(name, block) for block in found):
            prefix = f"{name}." if name else ""
            found += [f"{prefix}{key}" for key, child in module.named_children() if _is_block(child)]
    return tuple(found) or tuple(name for name, child in model.named_children() if _is_block(child))


def _is_block(module: nn.Module) -> bool:
    runs = not isinstance(module, nn.ModuleList | nn.ModuleDict)
    return runs and any(True for _ in module.children()) and any(True for _ in module.parameters())


def recompute_blocks(
    model: nn.Module, kind: Recompute, *, keep_random: bool = True, around: Around | None = None
) -> None:
    """From now on every block computes its activations again. `around` gives the contexts of a block's first and
    second pass; dropout falls the same in both with `keep_random`."""
    if kind == "none":
        return
    names = find_blocks(model)
    if not names:
        raise InputError(f"memory.recompute is {kind}, but {type(model).__name__} has no blocks to compute again")
    for name in names:
        block = model.get_submodule(name)
        block.forward = _again(block, kind, keep_random, around)


def _again(block: nn.Module, kind: Recompute, keep_random: bool, around: Around | None) -> Callable[..., Any]:
    once = block.forward

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, second = around(block) if around else (nullcontext(), nullcontext())
        if kind == "full":
            return first, _all(second, _statistics_stay(block))
        caching, cached = create_selective_checkpoint_contexts(_policy)
        return _all(first, caching), _all(second, _statistics_stay(block), cached)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return once(*args, **kwargs)
        return checkpoint(
            once, *args, use_reentrant=False, preserve_rng_state=keep_random, context_fn=contexts, **kwargs
        )

    return forward


def _policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if kind_of(func) in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _all(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextmanager
def _statistics_stay(block: nn.Module) -> Iterator[None]:
    """BatchNorm's running statistics have seen the batch in the first pass: now they are given no weight."""
    norms = [m for m in block.modules() if isinstance(m, _BatchNorm) and m.training and m.track_running_stats]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
