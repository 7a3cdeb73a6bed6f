"""`LossFinder`: finds out what a session's loss is, before the plan divides the model or with the first batch."""

from dataclasses import replace
from typing import Any

from torch import nn

from meshwright.errors import InputError
from meshwright.messages.exchange import all_gather_values
from meshwright.parallel.gather_samples import GatherSamples
from meshwright.plan import Plan
from meshwright.train.loss.loss import (
    Loss,
    LossFunction,
    ModelLoss,
    check_sample_comparison,
    classify_loss,
    loss_from_model,
    over_all_ranks,
)
from meshwright.train.loss.output_form import FakeModel
from meshwright.train.loss.target_counts import CountedByTarget
from meshwright.train.loss.trial import WithoutIgnoredTargets, find_loss, find_model_loss, is_from_torch


def needs_trial(function: LossFunction | None) -> bool:
    """Whether it takes a trial to find out what the loss is a mean over: the loss is inside the model (None), or a
    user's function."""
    return function is None or (classify_loss(function).kind == "samples" and not is_from_torch(function))


class LossFinder:
    """Keeps what is needed to try a loss: a copy of the model without memory, made before the plan divides the model.

    `loss` is what is known so far. `is_tried` says whether this is final; otherwise `try_batch` must be called with the
    first batch, on all ranks.
    """

    def __init__(
        self, function: LossFunction | None, model: nn.Module, plan: Plan, sample: Any, target_key: str | None
    ) -> None:
        self._function = function
        self._plan = plan
        self._target_key = target_key
        self._model: FakeModel | None = None
        if function is None:
            is_tried = sample is not None and plan.batch_parts > 1
            self.loss = find_model_loss(model, sample) if is_tried else loss_from_model(model)
        else:
            self.loss = classify_loss(function)
            if needs_trial(function):
                self._model = FakeModel(model)
                if sample is not None:
                    self._try(sample)
                    if plan.world_size > 1 and not plan.gradients.servers:
                        self._check_agreement()
        check_sample_comparison(self.loss, plan)

    @property
    def is_tried(self) -> bool:
        return self._model is None

    def _try(self, sample: Any) -> None:
        assert self._function is not None
        assert self._model is not None
        self.loss = find_loss(self._function, self._model, sample, self._target_key)
        self._model = None

    def try_batch(self, data: Any) -> None:
        """Tries the loss on a batch of this rank. All ranks must call this together."""
        self._try(data)
        self._check_agreement()
        check_sample_comparison(self.loss, self._plan)

    def _check_agreement(self) -> None:
        """Raises an `InputError` if ranks have found different results. All ranks must call this together."""
        results = all_gather_values([self.loss.kind, _kind_of_count(self.loss.function)])
        if any(result != results[0] for result in results):
            raise InputError(
                "ranks do not agree on what the loss is a mean over, because their sample batches differ: pass the same"
                " sample_batch to parallelize() on all ranks"
            )

    def over_ranks(self, gather: GatherSamples | None) -> Loss:
        """Returns the loss as a rank computes it: one that compares samples gets those of all ranks, and where nothing
        divides a batch, it may have ignored targets."""
        if isinstance(self.loss.function, WithoutIgnoredTargets) and self._plan.batch_parts == 1:
            return replace(self.loss, function=self.loss.function.function)
        if isinstance(self.loss.function, ModelLoss) and self.loss.function.routers is not None:
            self.loss.function.routers.connect(self._plan, gather.group if gather else None)
        return replace(self.loss, function=over_all_ranks(self.loss.function, gather))


def _kind_of_count(function: LossFunction) -> list[Any]:
    """Returns values that are equal on all ranks whose losses are divided by the same count."""
    if isinstance(function, CountedByTarget):
        return [function.leaf, function.rule]
    return [type(function).__name__]
