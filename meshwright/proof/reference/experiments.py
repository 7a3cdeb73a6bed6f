"""Experiments: the reference computes one step again by another rule, starting from the weights before that step. If it
then gets the same gradients as the ranks, the ranks have followed that rule."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshwright.proof.reference.groups import Grouping, choose_grouping, global_batches, uses_batch_statistics
from meshwright.proof.reference.rank_shares import rank_shares
from meshwright.proof.reference.reference import Reference, preserve_generators
from meshwright.proof.reference.reference_setup import build_setup
from meshwright.proof.request import ProofRequest
from meshwright.proof.torch_private import TO_COPY, TorchDispatchMode
from meshwright.train.output.observation import MANTISSA_BITS, digest_samples, drew_random_numbers, record_output_bits

T = TypeVar("T")
Tensors = dict[str, Tensor]
_OTHER_SEED_STEPS = 1_000_003  # added to the step number, from which seeds are derived, to draw other random numbers


@dataclass(frozen=True)
class ExperimentResult:
    """What one device computed in an experiment. `gradients` are those before clipping, `buffers` those after the step.
    `drew_random_numbers` says whether the step used a random generator. `bits` is the number of mantissa bits that each
    layer's output carried, by the layer's name."""

    loss: Tensor
    gradients: Tensors
    buffers: Tensors
    drew_random_numbers: bool
    bits: dict[str, int]


@dataclass(frozen=True)
class RankContribution:
    """What the samples of one data rank contribute to a step.

    `loss_sum` is the loss summed over all `target_count` targets of the rank, and `gradient_sums` are the gradients of
    this sum. `mean_losses` and `mean_gradients` are sums, over the rank's microbatches, of each microbatch's mean loss
    and of its gradients. `sample_weighted_losses` and `sample_weighted_gradients` are the same sums with each mean
    multiplied by the microbatch's number of samples.
    """

    gradient_sums: Tensors = field(default_factory=dict)
    loss_sum: float = 0.0
    target_count: float = 0.0
    microbatches: int = 0
    mean_gradients: Tensors = field(default_factory=dict)
    mean_losses: float = 0.0
    samples: int = 0
    sample_weighted_gradients: Tensors = field(default_factory=dict)
    sample_weighted_losses: float = 0.0


class Experiments:
    """Runs experiments on one step of a proof request. All of them start from `before`, the weights and buffers before
    the step."""

    def __init__(self, request: ProofRequest, device: torch.device, step: int, before: Tensors) -> None:
        self.request = request
        self.device = device
        self.step = step
        self.before = before

    @cached_property
    def grouping(self) -> Grouping:
        """The grouping of samples that the reference used."""
        setup = build_setup(self.request)
        return choose_grouping(setup.model.train(), self.request.plan, self.request.dropout, setup.compares_samples)

    @cached_property
    def compares_samples(self) -> bool:
        """Whether the loss compares the samples of a batch with each other."""
        return build_setup(self.request).compares_samples

    @cached_property
    def batch_statistics_layers(self) -> frozenset[str]:
        """The names of the modules whose output depends on the batch as a whole (BatchNorm)."""
        model = build_setup(self.request).model.train()
        return frozenset(name for name, module in model.named_modules() if uses_batch_statistics(module))

    @cached_property
    def canonical_names(self) -> dict[str, str]:
        """Maps each name of each parameter to the parameter's first name. Tied parameters have several names."""
        model = build_setup(self.request).model
        first: dict[int, str] = {}
        return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}

    @cached_property
    def expected_samples(self) -> list[tuple[tuple[str, ...], ...]]:
        """For each data rank, digests of the samples that it should have computed on: one tuple of digests per
        microbatch."""
        plan, setup = self.request.plan, build_setup(self.request)
        shares = rank_shares(plan, setup.global_batch)
        return [digest_samples(self._batch_of_step(setup.batches(share, plan.microbatches))) for share in shares]

    @cached_property
    def reference_step(self) -> ExperimentResult:
        """The step by the reference's own rule."""
        return self.run()

    def run(
        self,
        grouping: Grouping | None = None,
        *,
        dropout: bool | None = None,
        statistics_rank: int | None = None,
        frozen_statistics: bool = False,
        random_draw: int = 0,
        within: AbstractContextManager[Any] | None = None,
    ) -> ExperimentResult:
        """Computes the step with the given changes.

        `grouping` and `dropout` replace those of the reference. `statistics_rank` is the data rank whose samples update
        running statistics. With `frozen_statistics`, BatchNorm normalizes by its running statistics instead of those of
        the batch. Each `random_draw` above 0 uses other random numbers. The step is computed within the context
        `within`.
        """
        request = self.request if dropout is None else replace(self.request, dropout=dropout)
        with preserve_generators(self.device):
            reference = self._reference(request, grouping or self.grouping)
            batch = self._batch_of_step(global_batches(reference.setup, request.plan, grouping or self.grouping))
            if statistics_rank is not None:
                groups = (replace(group, updates_statistics=group.rank == statistics_rank) for group in batch.groups)
                batch = replace(batch, groups=tuple(groups))
            if frozen_statistics:
                _freeze_statistics(reference.model)
            reference.steps += random_draw * _OTHER_SEED_STEPS
            bits: dict[str, int] = {}
            stop_watching = record_output_bits(reference.model, bits)
            with within or nullcontext():
                loss = reference.compute(batch)
            stop_watching()
            buffers = {name: value.detach().cpu().clone() for name, value in reference.model.named_buffers()}
            return ExperimentResult(loss.cpu(), reference.gradients(), buffers, drew_random_numbers(self.device), bits)

    @cached_property
    def fewest_cast_bits(self) -> int:
        """The smallest number of mantissa bits that the model's own code casts a tensor to, on one device."""
        with preserve_generators(self.device):
            reference = self._reference(self.request, self.grouping)
            batch = self._batch_of_step(global_batches(reference.setup, self.request.plan, self.grouping))
            with _CastObserver() as casts:
                reference.compute(batch)
        return casts.fewest_bits

    @cached_property
    def rank_contributions(self) -> list[RankContribution]:
        """What each data rank contributes by itself. The list is empty if a rank's gradients depend on other ranks'
        samples, if the loss is a sum, or if the step has only one microbatch over all ranks."""
        request = self.request
        with preserve_generators(self.device):
            reference = self._reference(request, "local")
            if self.grouping == "synchronized" or (self.grouping == "whole" and self.batch_statistics_layers):
                return []
            if reference.loss_kind == "sum" or request.plan.batch_parts == 1:
                return []
            batch = self._batch_of_step(global_batches(reference.setup, request.plan, "local"))
            contributions = [RankContribution() for _ in range(request.plan.data_ranks)]
            rank = 0
            for group in batch.groups:
                if not group.samples:
                    continue
                if group.rank != rank:  # which has not seen the samples of the rank before
                    reference.model.load_state_dict(self.before, strict=False)
                    rank = group.rank
                gradients, loss_sum, target_count = reference.compute_group(group)
                contributions[group.rank] = _with_microbatch(
                    contributions[group.rank], gradients, loss_sum, target_count, group.samples
                )
            return contributions

    @cached_property
    def forward_changes_state(self) -> bool:
        """Whether the same samples have other gradients when the model computes them again."""
        with preserve_generators(self.device):
            reference = self._reference(self.request, "local")
            batch = self._batch_of_step(global_batches(reference.setup, self.request.plan, "local"))
            group = next(group for group in batch.groups if group.samples)
            first, again = (reference.compute_group(group)[0] for _ in range(2))
            return any(not torch.equal(first[name], again[name]) for name in first)

    @cached_property
    def optimized_names(self) -> frozenset[str]:
        """The names of the parameters that one device's optimizer updates."""
        with preserve_generators(self.device):
            reference = self._reference(self.request, self.grouping)
        names = {id(parameter): name for name, parameter in reference.model.named_parameters()}
        return frozenset(names[id(p)] for group in reference.optimizer.param_groups for p in group["params"])

    def _reference(self, request: ProofRequest, grouping: Grouping) -> Reference:
        reference = Reference(build_setup(request), request, grouping, self.device)
        reference.model.load_state_dict(self.before, strict=False)
        reference.steps = self.step - 1
        return reference

    def _batch_of_step(self, batches: Iterator[T]) -> T:
        return next(islice(batches, self.step - 1, None))


class _CastObserver(TorchDispatchMode):
    """While it is active, records in `fewest_bits` the mantissa bits of the shortest type that floating-point tensors
    are cast to."""

    def __init__(self) -> None:
        super().__init__()
        self.fewest_bits = max(MANTISSA_BITS.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is TO_COPY and args[0].numel() > 1 and args[0].dtype in MANTISSA_BITS:
            self.fewest_bits = min(self.fewest_bits, MANTISSA_BITS.get(result.dtype, self.fewest_bits))
        return result


def _with_microbatch(
    contribution: RankContribution, gradients: Tensors, loss_sum: float, target_count: float, samples: int
) -> RankContribution:
    """Returns the contribution with one more microbatch. `gradients` are those of `loss_sum`, the sum of the
    microbatch's loss."""
    mean = 1 / target_count if target_count else 0.0  # a microbatch without targets contributes nothing
    return RankContribution(
        gradient_sums=add_scaled(contribution.gradient_sums, gradients),
        loss_sum=contribution.loss_sum + loss_sum,
        target_count=contribution.target_count + target_count,
        microbatches=contribution.microbatches + 1,
        mean_gradients=add_scaled(contribution.mean_gradients, gradients, mean),
        mean_losses=contribution.mean_losses + loss_sum * mean,
        samples=contribution.samples + samples,
        sample_weighted_gradients=add_scaled(contribution.sample_weighted_gradients, gradients, samples * mean),
        sample_weighted_losses=contribution.sample_weighted_losses + samples * loss_sum * mean,
    )


def add_scaled(tensors: Tensors, addends: Tensors, weight: float = 1.0) -> Tensors:
    """Returns tensors + weight × addends, by name. A tensor that is on one side only counts as zero on the other
    side."""
    result = dict(tensors)
    for name, value in addends.items():
        result[name] = result[name] + weight * value if name in result else weight * value
    return result


def _freeze_statistics(model: nn.Module) -> None:
    for module in model.modules():
        if uses_batch_statistics(module):
            module.eval()
