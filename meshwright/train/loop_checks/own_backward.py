"""Which plans loops that call backward themselves can train under, and what such a loop gave as a loss."""

from typing import Any

from torch import Tensor

from meshwright.plan import Plan


def describe_loss(value: Any) -> str:
    """Returns what a user gave as a loss: its class, or of a tensor the shape, and whether it has no gradient."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)}{'' if value.requires_grad else ' without a gradient'}"


def why_only_step(plan: Plan) -> str | None:
    """Returns why only `Session.step` can train under this plan; None if loops with their own backward can, too."""
    if plan.axes.pipeline > 1:
        return "a pipeline runs forward and backward passes of microbatches in turns, call session.step(batch) instead"
    if plan.memory.accumulation > 1:
        return (
            f"memory.accumulation is {plan.memory.accumulation}, which session.step does: call it instead, or set"
            " accumulation to 1 and accumulate in your loop with session.no_sync()"
        )
    if plan.gradients.local_steps > 1:
        return "gradients.local_steps is for session.step: call it instead, or set local_steps to 1"
    if plan.numerics.precision == "fp16":
        return "gradients in fp16 need the loss scale of session.step: call it instead, or choose bf16 or fp32"
    if plan.shares.adaptive:
        return (
            "shares.adaptive measures the steps of session.step: call it instead, or set adaptive to false and give"
            " shares.samples"
        )
    if plan.gradients.powersgd_rank:
        return "gradients.powersgd_rank is for session.step: call it instead, or set powersgd_rank to 0"
    return None
