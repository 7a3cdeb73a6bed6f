"""Experiments: one step of the reference again, from the weights before the first difference, by another rule. The rule
under which one device computes what the ranks did is what the ranks did."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.data.loading import Share
from meshwright.proof.question import Question
from meshwright.proof.reference.groups import Grouping, global_batches, grouping, looks_at_the_batch
from meshwright.proof.reference.reference import Reference, generators_kept
from meshwright.proof.reference.setting import set_up
from meshwright.train.output.witness import BITS, drew, samples_of, watch_bits

T = TypeVar("T")
Tensors = dict[str, Tensor]
_ELSEWHERE = 1_000_003  # steps ahead, where random numbers are others


@dataclass(frozen=True)
class Outcome:
    """What one device computed: before clipping, with the buffers behind the step. `drew`: it used random numbers."""

    loss: Tensor
    gradients: Tensors
    buffers: Tensors
    drew: bool
    bits: dict[str, int]


@dataclass(frozen=True)
class Brought:
    """What a data rank's samples bring: the gradients of their sum, the sum, and its count; beside them the sums of its
    microbatches' own means, plain and by how many samples they have."""

    gradients: Tensors = field(default_factory=dict)
    loss: float = 0.0
    count: float = 0.0
    microbatches: int = 0
    means: Tensors = field(default_factory=dict)
    mean_losses: float = 0.0
    samples: int = 0
    by_samples: Tensors = field(default_factory=dict)
    losses_by_samples: float = 0.0


class Laboratory:
    """For one step of a question, which starts from `before`."""

    def __init__(self, question: Question, device: torch.device, step: int, before: Tensors) -> None:
        self.question = question
        self.device = device
        self.step = step
        self.before = before

    @cached_property
    def kind(self) -> Grouping:
        """The groups that the reference took."""
        setting = set_up(self.question)
        return grouping(setting.model.train(), self.question.plan, self.question.dropout, setting.loss)

    @cached_property
    def batch_layers(self) -> frozenset[str]:
        """Modules that look at a batch as a whole."""
        model = set_up(self.question).model.train()
        return frozenset(name for name, module in model.named_modules() if looks_at_the_batch(module))

    @cached_property
    def first_names(self) -> dict[str, str]:
        """Of every name that a weight has, the first: tied weights have several."""
        model = set_up(self.question).model
        first: dict[int, str] = {}
        return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}

    @cached_property
    def samples(self) -> list[tuple[tuple[str, ...], ...]]:
        """Of each data rank, what it should have been given."""
        plan, setting = self.question.plan, set_up(self.question)
        shares = [Share(rank, plan.data_ranks) for rank in range(plan.data_ranks)]
        return [samples_of(self._nth(setting.batches(share, plan.microbatches))) for share in shares]

    @cached_property
    def usual(self) -> Outcome:
        """The step as the reference took it."""
        return self.run()

    def run(
        self,
        kind: Grouping | None = None,
        *,
        dropout: bool | None = None,
        learns: int | None = None,
        frozen_statistics: bool = False,
        elsewhere: int = 0,
    ) -> Outcome:
        """`learns`: the data rank whose samples running statistics learn from. `elsewhere`: other random numbers."""
        question = self.question if dropout is None else replace(self.question, dropout=dropout)
        with generators_kept(self.device):
            reference = self._reference(question, kind or self.kind)
            batch = self._nth(global_batches(reference.setting, question.plan, kind or self.kind))
            if learns is not None:
                groups = tuple(replace(group, counts=group.rank == learns) for group in batch.groups)
                batch = replace(batch, groups=groups)
            if frozen_statistics:
                _freeze(reference.model)
            reference.steps += elsewhere * _ELSEWHERE
            bits: dict[str, int] = {}
            end = watch_bits(reference.model, bits)
            loss = reference.compute(batch)
            end()
            buffers = {name: value.detach().cpu().clone() for name, value in reference.model.named_buffers()}
            return Outcome(loss.cpu(), reference.gradients(), buffers, drew(self.device), bits)

    @cached_property
    def narrowest(self) -> int:
        """The fewest bits that the model's own code casts anything to on one device."""
        with generators_kept(self.device):
            reference = self._reference(self.question, self.kind)
            batch = self._nth(global_batches(reference.setting, self.question.plan, self.kind))
            with _Casts() as casts:
                reference.compute(batch)
        return casts.bits

    @cached_property
    def shares(self) -> list[Brought]:
        """Of each data rank by itself; none where its gradients depend on others' samples or nothing is a mean."""
        question = self.question
        with generators_kept(self.device):
            reference = self._reference(question, "local")
            if self.kind == "synchronized" or (self.kind == "whole" and self.batch_layers):
                return []
            if reference.loss_kind == "sum" or question.plan.shares == 1:
                return []
            batch = self._nth(global_batches(reference.setting, question.plan, "local"))
            found = [Brought() for _ in range(question.plan.data_ranks)]
            for group in batch.groups:
                if not group.samples:
                    continue
                gradients, loss, count = reference.part_of(group)
                found[group.rank] = _with(found[group.rank], gradients, loss, count, group.samples)
            return found

    @cached_property
    def held(self) -> frozenset[str]:
        """The weights that one device's optimizer has."""
        with generators_kept(self.device):
            reference = self._reference(self.question, self.kind)
        names = {id(parameter): name for name, parameter in reference.model.named_parameters()}
        return frozenset(names[id(p)] for group in reference.optimizer.param_groups for p in group["params"])

    def _reference(self, question: Question, kind: Grouping) -> Reference:
        reference = Reference(set_up(question), question, kind, self.device)
        reference.model.load_state_dict(self.before, strict=False)
        reference.steps = self.step - 1
        return reference

    def _nth(self, batches: Iterator[T]) -> T:
        return next(islice(batches, self.step - 1, None))


class _Casts(TorchDispatchMode):
    """Notes to which types floating-point numbers are cast."""

    def __init__(self) -> None:
        super().__init__()
        self.bits = max(BITS.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].numel() > 1 and args[0].dtype in BITS:
            self.bits = min(self.bits, BITS.get(result.dtype, self.bits))
        return result


def _with(brought: Brought, gradients: Tensors, loss: float, count: float, samples: int) -> Brought:
    mean = 1 / count if count else 0.0  # no target at all brings nothing
    return Brought(
        gradients=added(brought.gradients, gradients),
        loss=brought.loss + loss,
        count=brought.count + count,
        microbatches=brought.microbatches + 1,
        means=added(brought.means, gradients, mean),
        mean_losses=brought.mean_losses + loss * mean,
        samples=brought.samples + samples,
        by_samples=added(brought.by_samples, gradients, samples * mean),
        losses_by_samples=brought.losses_by_samples + samples * loss * mean,
    )


def added(one: Tensors, other: Tensors, weight: float = 1.0) -> Tensors:
    """one + weight × other; what a side does not have is zero."""
    result = dict(one)
    for name, value in other.items():
        result[name] = result[name] + weight * value if name in result else weight * value
    return result


def _freeze(model: nn.Module) -> None:
    for module in model.modules():
        if looks_at_the_batch(module):
            module.eval()
