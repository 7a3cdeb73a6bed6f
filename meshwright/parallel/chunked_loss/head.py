"""Joins the head of a model with its loss (`compute.loss_chunks`): the head returns lazy scores, from which a cross
entropy is computed chunk by chunk."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blocks.module_names import is_inside
from meshwright.blocks.recompute import find_blocks
from meshwright.errors import InputError
from meshwright.parallel.chunked_loss.scores import lazy_scores, run_uncompiled
from meshwright.parallel.chunked_loss.traced_scores import opaque_loss, traced_scores
from meshwright.parallel.torch_private import uncompiled
from meshwright.plan import Plan

_OFF = "set compute.loss_chunks to 1"


def head_to_join(plan: Plan, model: nn.Module, head: Callable[[], str | None]) -> str:
    """Returns the name of the head that is joined with the loss under a plan with `loss_chunks`. Raises an `InputError`
    if the model has no such head, or one that the plan cannot join. `head` finds the head of the model."""
    chunks = plan.compute.loss_chunks
    name = head()
    if name is None:
        raise InputError(
            f"plan.compute.loss_chunks is {chunks}, but {type(model).__name__} returns no scores of an nn.Linear that"
            f" it calls once: {_OFF}"
        )
    block = next((block for block in find_blocks(model) if is_inside(name, block)), None)
    changes_blocks = plan.axes.shard > 1 or plan.memory.recompute != "none" or plan.compute.compile != "none"
    if block is not None and changes_blocks:
        raise InputError(
            f"plan.compute.loss_chunks is {chunks}, but the head {name} lies in the block {block}, which the plan"
            f" ({plan.summary()}) shards, recomputes or compiles: {_OFF}"
        )
    return name


def join_head_with_loss(head: nn.Linear, plan: Plan) -> None:
    """Makes the head return lazy scores in training, in place. Evaluations get ordinary scores. On one rank, a model
    that is compiled as a whole has head and loss in its graph; on several they run uncompiled, because DDP looks for
    the scores in the model's output."""
    compute_scores, chunks = head.forward, plan.compute.loss_chunks
    is_compiled = plan.compute.compile != "none"
    loss_in_chunks = opaque_loss() if is_compiled and plan.world_size == 1 else None

    def forward(hidden: Tensor) -> Any:
        if not (torch.is_grad_enabled() and head.training):
            return compute_scores(hidden)
        if loss_in_chunks is not None and torch.compiler.is_compiling():
            return traced_scores(hidden, head.weight, head.bias, chunks, loss_in_chunks)
        return lazy_scores(hidden, head.weight, head.bias, chunks)

    if is_compiled and loss_in_chunks is None:
        run_uncompiled()
        forward = uncompiled(forward)
    head.forward = forward  # type: ignore[method-assign, assignment]
