"""What a loss is a mean over, so that ranks, microbatches and ignored targets are weighted right.

A loss is called as `loss(output, target)` and returns one of

- a scalar: the mean over the batch's samples;
- a pair (sum, count): the mean is the sum over the count, both taken over the whole global batch.

torch's cross entropy and negative log likelihood are known to divide by the number (or class weight) of
targets that are not ignored, and any torch loss with `reduction="sum"` to be a sum.

A loss that compares a batch's samples with each other has a method `joined(across)`, which returns it for one rank of
many: `across(rows)` gives the rows of all ranks and where this rank's begin. It returns the sum over its own samples,
whose mean is taken over the global batch.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.train.metrics import without_rows

LossFunction = Callable[[Any, Any], Any]
Kind = Literal["samples", "targets", "sum", "joined"]


@dataclass(frozen=True)
class Loss:
    """A loss function and what it is a mean over.

    `samples`: `function` returns a batch's mean. `targets`: it returns the sum over the targets that are not
    ignored (a mean over none of them would be 0/0). `sum`: the job wants the sum over the global batch. `joined`: it
    returns the sum over the batch's samples, which it compares with those of other ranks.
    """

    function: LossFunction
    kind: Kind
    ignore_index: int = -100
    class_weight: Tensor | None = None

    def count(self, target: Any, samples: int) -> Tensor | float:
        """How many samples or targets (or how much class weight) a batch brings; told before its forward."""
        if self.kind != "targets" or not isinstance(target, Tensor) or not samples:
            return float(samples)
        if target.is_floating_point():  # class probabilities: nothing is ignored
            return float(target.numel() / target.shape[-1 if target.dim() == 1 else 1])
        valid = target != self.ignore_index
        if self.class_weight is None:
            return valid.sum()
        return self.class_weight.to(target.device)[target[valid]].sum()

    def term(self, output: Any, target: Any, samples: int) -> "Term":
        """A batch's part of the global sum. A borrowed sample (`samples` = 0) has no weight."""
        if self.kind == "joined" and not samples:  # nor is it anybody's other sample
            output = without_rows(output)
        value, own_count = _value_and_count(self.function(output, target))
        present = 1.0 if samples else 0.0
        if own_count is not None:
            return Term(value, present, own_count * present)
        return Term(value, float(samples) if self.kind == "samples" else present, None)


@dataclass(frozen=True)
class Term:
    """`value` times `weight` is a batch's part of the sum; `own_count` is what a loss that returns pairs told."""

    value: Tensor
    weight: float
    own_count: Tensor | None

    @property
    def sum(self) -> Tensor:
        """Without its graph."""
        value = self.value.detach()
        return value if self.weight == 1.0 else value * self.weight


def join(function: Any, across: Callable[[Tensor], tuple[Tensor, int]] | None) -> Any:
    """A loss or metric for one rank of many, where it compares samples with each other."""
    return function.joined(across) if across is not None and hasattr(function, "joined") else function


def check_joined(loss: Loss, plan: Plan) -> None:
    """A loss over samples of the whole global batch wants to see them at once."""
    if loss.kind != "joined":
        return
    if plan.microbatches > 1:
        raise InputError(
            f"the loss compares all samples of a global batch with each other, but the plan ({plan.summary()}) cuts a"
            f" rank's share of it into {plan.microbatches} microbatches: set memory.accumulation and"
            " pipeline.microbatches to 1"
        )
    if plan.gradients.servers:
        raise InputError(
            "the loss compares all samples of a global batch with each other, but workers of parameter servers do not"
            " meet: set gradients.servers to 0"
        )


def models_own() -> Loss:
    """For models that return their loss: as a scalar, as `output.loss`, or under the key `loss`."""

    def pick(output: Any, target: Any) -> Any:
        found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        if isinstance(found, Tensor) and found.numel() == 1:
            return found
        raise InputError(f"the job has no loss, and the model returned {type(output).__name__} without one")

    return Loss(pick, "samples")


def understand(function: LossFunction) -> Loss:
    """Finds out what a loss is a mean over; a function we do not know is taken as a mean over samples."""
    keywords: dict[str, Any] = {}
    inner: Any = function
    if hasattr(function, "joined"):
        return Loss(function, "joined")
    while isinstance(inner, partial):
        keywords = {**inner.keywords, **keywords}
        inner = inner.func
    if isinstance(inner, nn.Module):
        keywords = {name: getattr(inner, name, None) for name in ("reduction", "ignore_index", "weight")}
    reduction = keywords.get("reduction")
    if reduction == "none":
        raise InputError("the loss has reduction='none': a loss must return one number, use 'mean' or 'sum'")
    if reduction == "sum":
        return Loss(function, "sum")
    ignored = keywords.get("ignore_index")
    ignore_index = -100 if ignored is None else int(ignored)
    if isinstance(inner, nn.CrossEntropyLoss | nn.NLLLoss):
        summed: Any = copy(inner)
        summed.reduction = "sum"
        return Loss(summed, "targets", ignore_index, keywords.get("weight"))
    if inner in (F.cross_entropy, F.nll_loss):
        summed = partial(cast(Any, function), reduction="sum")
        return Loss(summed, "targets", ignore_index, keywords.get("weight"))
    return Loss(function, "samples")


def _value_and_count(result: Any) -> tuple[Tensor, Tensor | None]:
    """What a loss function returned: (its number, None) or (sum, count)."""
    if isinstance(result, Tensor) and result.numel() == 1:
        return result.reshape(()), None
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor):
        total, count = result
        if total.numel() == 1:
            return total.reshape(()), torch.as_tensor(count, device=total.device).reshape(())
    shape = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
    raise InputError(f"the loss returned {shape}: return one number, or a pair (sum, count)")
