"""`UnusedParameters`: names the parameters that get no gradient, so that they are not trained."""

import warnings
from collections.abc import Sequence

import torch.distributed as dist

from meshwright.messages.exchange import all_gather_values
from meshwright.parallel.branches.check import has_assigned_branches
from meshwright.parallel.model import ParallelModel

WATCHED_STEPS = 10  # a parameter that some of them use is used, such as one of an expert
_MOST_NAMES = 8


class UnusedParameters:
    """Looks at the gradients of the first steps, and then warns once, on rank 0, of trainable parameters without any.
    A model with such parameters trains under every plan, as it does on one device; but most of them are a mistake."""

    def __init__(self) -> None:
        self._steps = 0
        self._unused: set[str] = set()

    def look(self, parallel: ParallelModel) -> None:
        """All ranks call this together in every step, when the gradients of the ranks are combined."""
        if self._steps == WATCHED_STEPS:
            return
        parameters = parallel.parameters()
        if self._steps == 0:
            self._unused = {name for name, parameter in parameters.items() if parameter.requires_grad}
        self._unused = {name for name in self._unused if parameters[name].grad is None}
        self._steps += 1
        if self._steps < WATCHED_STEPS:
            return
        unused = self._over_ranks(parallel)
        if unused and (not dist.is_initialized() or dist.get_rank() == 0):
            warnings.warn(describe_unused(unused), stacklevel=2)

    def _over_ranks(self, parallel: ParallelModel) -> list[str]:
        """Returns the parameters that no rank has used, in the model's order. Where all ranks hold the same parameters,
        they know the same of them."""
        unused = self._unused
        if parallel.plan.axes.pipeline > 1 or has_assigned_branches(parallel.plan):
            unused = {name for names in all_gather_values(sorted(unused)) for name in names}
            used_here = sorted(unused & (parallel.parameters().keys() - self._unused))
            unused -= {name for names in all_gather_values(used_here) for name in names}
        return [name for name in parallel.state_names if name in unused]


def describe_unused(names: Sequence[str]) -> str:
    """Returns the warning about these parameters."""
    shown = ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else "")
    subject, they = ("1 parameter", "it is") if len(names) == 1 else (f"{len(names)} parameters", "they are")
    return (
        f"{subject} got no gradient in the first {WATCHED_STEPS} steps, so {they} not trained: {shown}. The loss does"
        " not depend on what the model computes with them: correct the forward pass or the loss, or freeze them"
        " (train.freeze of a job, requires_grad_(False) in a script)"
    )
