"""What a loss is a mean over, so that ranks, microbatches and ignored targets get the right weights.

A loss is called as `loss(output, target)` and returns one of

- a scalar: the mean over the batch's samples;
- a pair (sum, count): the loss is the sum divided by the count, both taken over the whole global batch. A negative
  count would maximize the loss. If it is a tensor, it makes the loss NaN, because reading it would wait for the device.

torch's cross entropy and negative log likelihood are recognized: their mean is over the targets that are not ignored,
weighted by class if they have class weights. A loss with `reduction="sum"` is recognized, too, and is not divided. What
other losses are is found out by trying them on a sample batch (trial.py).

A loss that compares the samples of a batch with each other has a method `joined(across)`, which returns the loss for
one rank of many: `across(rows)` returns the rows of all ranks, and the index at which this rank's rows begin. The
returned loss gives the sum over this rank's samples; the sum over all ranks is divided by the number of samples.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.model_io.batch import find_model_value
from meshwright.numbers.limits import is_number
from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules
from meshwright.train.loss.cross_entropy import CountedMean, CountTargetsInModules, count_targets
from meshwright.train.loss.detection import BoxCounts, DetectorLoss, has_detector
from meshwright.train.loss.router_loss import RouterLosses
from meshwright.train.metrics import compares_samples, without_rows

LossFunction = Callable[[Any, Any], Any]
Kind = Literal["samples", "targets", "sum", "compares_samples", "terms"]


@dataclass(frozen=True)
class Loss:
    """A loss function and what it is a mean over.

    `kind` says what `function` returns. `samples`: the mean over the batch's samples. `targets`: the sum over the
    targets that are not ignored (a mean would be 0/0 if all are ignored). `sum`: the sum over the batch; the loss is
    the sum over the global batch, and is not divided. `compares_samples`: the sum over the batch's samples, which the
    function compares with the samples of other ranks. `terms`: a sum of means over different numbers of objects, each
    multiplied by this rank's part of its number over all ranks (detection.py); `function` is called with whether there
    are samples in place of the target, and the results of all ranks are added. The model's forward pass runs within
    `forward_context(has_samples)`. `is_divisible` is False for a loss inside a model that cannot be computed from the
    losses of parts of a batch. `whole` is the function for batches that are not divided, if it is another one.
    """

    function: LossFunction
    kind: Kind
    ignore_index: int = -100
    class_weight: Tensor | None = None
    forward_context: Callable[..., AbstractContextManager[Any]] = nullcontext
    is_divisible: bool = True
    whole: LossFunction | None = None

    def count(self, target: Any, samples: int) -> Tensor | float:
        """The number of the batch's samples or valid targets, or the sum of the class weights of these targets. The sum
        of the loss is divided by the sum of these counts. Can be called before the forward pass."""
        if self.kind != "targets" or not isinstance(target, Tensor) or not samples:
            return float(samples)
        return count_targets(target, self.ignore_index, self.class_weight)

    def evaluate(self, output: Any, target: Any, has_samples: bool) -> Any:
        """Returns what the loss function returns for a batch. A batch without samples only lets a rank take part in a
        step."""
        if self.kind == "terms":
            return self.function(output, has_samples)
        if self.kind == "compares_samples" and not has_samples:  # other ranks must not compare with its samples either
            output, target = without_rows(output), without_rows(target)
        return self.function(output, target)

    def term(self, output: Any, target: Any, samples: int) -> "LossTerm":
        """Returns what the batch adds to the sum over the global batch; with `samples` 0, its weight is 0."""
        return self.term_of(self.evaluate(output, target, samples > 0), samples)

    def term_of(self, result: Any, samples: int) -> "LossTerm":
        """Returns what a batch adds to the sum over the global batch, given what `evaluate` returned for it."""
        value, returned_count = _value_and_count(result)
        if self.kind == "terms":
            return LossTerm(value, 1.0, None)
        present = 1.0 if samples else 0.0
        if returned_count is not None:
            return LossTerm(value, present, returned_count * present)
        return LossTerm(value, float(samples) if self.kind == "samples" else present, None)

    @property
    def routers(self) -> RouterLosses | None:
        """The load-balancing losses that the model adds to its loss; None if it has none, or none is used."""
        routers = self.function.routers if isinstance(self.function, ModelLoss) else None
        return routers if routers is not None and routers.is_used else None

    @property
    def is_divided(self) -> bool:
        """Whether the sum of the loss over ranks and microbatches is divided by the sum of their counts."""
        return self.kind not in ("sum", "terms")

    def is_in(self, output: Any) -> bool:
        """Whether a loss can be computed from this output. Models that compute their loss themselves may do so in
        training mode only."""
        return not isinstance(self.function, ModelLoss | DetectorLoss) or find_model_value(output) is not None

    def mean(self, output: Any, target: Any, has_samples: bool = True) -> Tensor:
        """Returns the loss of a batch that is the whole global batch, for a loss that does not compare samples. Its
        gradient is 0 if no target is valid, but its value need not be: see `value_of_mean`."""
        result = self.whole(output, target) if self.whole else self.evaluate(output, target, has_samples)
        if isinstance(result, CountedMean):
            return result.mean
        value, returned_count = _value_and_count(result)
        if returned_count is None:
            if self.whole or self.kind != "targets" or not isinstance(target, Tensor):
                return value
            count = count_targets(target, self.ignore_index, self.class_weight)
            returned_count = count if isinstance(count, Tensor) else torch.tensor(count)
        is_integer = not returned_count.is_floating_point()
        return value / (returned_count.clamp(min=1) if is_integer else returned_count + (returned_count == 0))

    def value_of_mean(self, mean: Tensor, target: Any) -> Tensor:
        """Returns the value of what `mean` returned, which is 0 if no target is valid: torch's cross entropy is 0/0
        then. Without gradients, this takes less time than a division by the number of targets."""
        value = mean.detach()
        if self.kind != "targets" or not isinstance(target, Tensor) or target.is_floating_point():
            return value
        return torch.where((target != self.ignore_index).any(), value, 0)

    def sum_and_count(self, output: Any, target: Any, samples: int) -> tuple[Tensor, Tensor | float]:
        """Returns what the batch adds to the sum of the loss, and to the number by which that sum is divided."""
        term = self.term(output, target, samples)
        return term.sum, self.count(target, samples) if term.returned_count is None else term.returned_count


@dataclass(frozen=True)
class LossTerm:
    """What one batch adds to the sum over the global batch: `value` times `weight`. `returned_count` is the count if
    the loss function returns (sum, count) pairs, otherwise None."""

    value: Tensor
    weight: float
    returned_count: Tensor | None

    @property
    def sum(self) -> Tensor:
        """`value` times `weight`, detached from the graph."""
        value = self.value.detach()
        return value if self.weight == 1.0 else value * self.weight


def over_all_ranks(function: Any, across: Callable[[Tensor], tuple[Tensor, int]] | None) -> Any:
    """Returns `function.joined(across)` if there are several ranks and the loss or metric compares samples, otherwise
    `function` itself. `across` is None if there is only one rank."""
    return function.joined(across) if across is not None and compares_samples(function) else function


def check_sample_comparison(loss: Loss, plan: Plan) -> None:
    """Raises an `InputError` if the loss compares all samples of a global batch, but never gets all of them together
    under this plan."""
    check_rules(plan, loss=loss, routers=loss.routers is not None)


class ModelLoss:
    """The loss function for a model that computes its loss itself, and returns it as `find_model_value` says. If the
    model computes cross entropies, the result is a pair (sum, count) with their number of targets. Otherwise it is the
    loss itself, which is taken as a mean over samples."""

    def __init__(self, routers: RouterLosses | None = None) -> None:
        self._counting = CountTargetsInModules()
        self.routers = routers

    @contextmanager
    def forward_context(self, has_samples: bool = True) -> Iterator[None]:
        """The context for the model's forward pass."""
        self._counting.counts.clear()
        with self._counting.active(), self.routers.active(has_samples) if self.routers else nullcontext():
            yield

    def __call__(self, output: Any, target: Any) -> Any:
        value = find_model_value(output)
        if value is None:
            raise InputError(f"the job has no loss, and the model returned {type(output).__name__} without one")
        counts = self._counting.counts
        if not counts:
            return value
        count = counts[0]
        counts.clear()
        return CountedMean(value, count)


def loss_from_model(model: nn.Module | None = None) -> Loss:
    """Returns the `Loss` for a model that computes its loss itself. Without the model, it is not known whether this is
    one of torchvision's detectors, and the loss is right for undivided batches only."""
    if model is not None and has_detector(model):
        counts = BoxCounts()
        return Loss(DetectorLoss(counts), "terms", forward_context=counts.recording)
    function = ModelLoss(RouterLosses(model) if model is not None else None)
    return Loss(function, "samples", forward_context=function.forward_context)


def classify_loss(function: LossFunction) -> Loss:
    """Returns the `Loss` that says what a loss function is a mean over. A function that is not recognized is taken as a
    mean over samples."""
    keywords: dict[str, Any] = {}
    inner: Any = function
    if compares_samples(function):
        return Loss(function, "compares_samples")
    while isinstance(inner, partial):
        keywords = {**inner.keywords, **keywords}
        inner = inner.func
    if isinstance(inner, nn.Module):
        keywords = {name: getattr(inner, name, None) for name in ("reduction", "ignore_index", "weight")}
    reduction = keywords.get("reduction")
    if reduction == "none":
        raise InputError("the loss has reduction='none': a loss must return one number, use 'mean' or 'sum'")
    is_legacy_sum = keywords.get("size_average") is False and keywords.get("reduce") is not False
    if reduction == "sum" or is_legacy_sum:
        return Loss(function, "sum")
    index = keywords.get("ignore_index")
    ignore_index = -100 if index is None else int(index)
    if isinstance(inner, nn.CrossEntropyLoss | nn.NLLLoss) or inner in (F.cross_entropy, F.nll_loss):
        weight = keywords.get("weight")
        # The gradient of a mean over no valid targets is 0, unless they have weights: these may be 0 for valid targets.
        whole = function if weight is None else None
        return Loss(_with_sum(function), "targets", ignore_index, weight, whole=whole)
    return Loss(function, "samples")


def _with_sum(cross_entropy: Any) -> LossFunction:
    """Returns a cross entropy that is the sum over the targets, not their mean."""
    if not isinstance(cross_entropy, nn.Module):
        return partial(cross_entropy, reduction="sum")
    sum_loss: Any = copy(cross_entropy)
    sum_loss.reduction = "sum"
    return sum_loss


def _value_and_count(result: Any) -> tuple[Tensor, Tensor | None]:
    """Returns the value and None if the loss function returned a scalar, or the sum and the count if it returned a
    pair."""
    if isinstance(result, Tensor) and result.numel() == 1:
        return result.reshape(()), None
    if isinstance(result, CountedMean):
        return result.total.reshape(()), torch.as_tensor(result.number, device=result.total.device).reshape(())
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor):
        total, count = result
        if total.numel() == 1:
            if not isinstance(count, Tensor):
                check_returned_count(count)
            number = torch.as_tensor(count, device=total.device).reshape(())
            return torch.where(number < 0, torch.nan, total.reshape(())), number
    shape = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
    raise InputError(f"the loss returned {shape}: return one number, or a pair (sum, count)")


def check_returned_count(count: Any) -> None:
    """Raises an `InputError` if the count that a loss function returned is negative or no number."""
    if not (is_number(count) and 0 <= count < math.inf):
        raise InputError(
            f"the loss returned a pair (sum, count) with the count {count!r:.50}: return the number of targets that the"
            " sum is over, at least 0"
        )
