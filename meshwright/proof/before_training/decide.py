"""Decides, in one process, how a training is checked: whether it was checked before, how small it is made, and in which
precision it runs. What is decided is tried there, so that ranks do not fail."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshwright.data.randomness import preserve_generators
from meshwright.plan import Plan
from meshwright.profile.fake import batch_size
from meshwright.proof.before_training.digest import check_digest
from meshwright.proof.before_training.fake_step import FakeStep, fake_step_or_none, runs_forward
from meshwright.proof.before_training.kept import is_kept
from meshwright.proof.before_training.plan_kind import samples_of_check
from meshwright.proof.before_training.reduction import (
    Reduction,
    longest_sizes,
    parameter_count,
    reduced_plan,
    reduced_training,
    removable_blocks,
)
from meshwright.proof.before_training.stand_in_loss import TARGET, stand_in_loss, with_target
from meshwright.proof.before_training.training import Training
from meshwright.proof.before_training.vocabulary import large_vocabularies
from meshwright.proof.before_training.widths import NARROW, wide_sizes
from meshwright.proof.reference.groups import choose_grouping
from meshwright.proof.reference.reference import Reference
from meshwright.proof.reference.reference_setup import build_setup
from meshwright.proof.request import ProofRequest, UserModel
from meshwright.proof.sample_dataset import SampleDataset
from meshwright.user.code import first_line

STEPS = 2  # the second one starts from weights that the plan has updated
_ONE_STEP_WEIGHTS = 5 * 10**6  # of a model for which one step is compared, because each takes long
_ENOUGH_S = 6.0  # a check that is estimated to take no longer is not made smaller
_MOST_S = 90.0  # one that is estimated to take longer, however small, is not made
_FLOPS_PER_S = {"cpu": 8e9, "cuda": 1e12}  # in fp64, of one core or one GPU
_PASSES = 2.5  # each step is computed by the ranks and by the reference, and tried once
_S_PER_WEIGHT = 4e-7  # to write, read and compare a weight, its gradient and its optimizer state in one step
_BYTES_PER_WEIGHT = 8 * 4  # of a copy of the model in fp64, with gradients and an optimizer's state
_WIDTHS_TRIED = 6  # sizes of wide layers that are made small, one after the other; each takes a traced pass
_LENGTH = 64  # to which sequences and images are cut


@dataclass(frozen=True)
class Decision:
    """How a training is checked. `digest` is None if it cannot be kept. `kept`: it was found equal before. `problem`
    says why it is not checked, and is None if it is. `has_loss` is False if a loss stands in for the user's."""

    digest: str | None = None
    kept: bool = False
    problem: str | None = None
    reduction: Reduction = field(default_factory=Reduction)
    has_loss: bool = True

    def to_plain(self) -> dict[str, Any]:
        """The decision as plain values, to send it to other ranks."""
        return {**vars(self), "reduction": self.reduction.to_plain()}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "Decision":
        return cls(**{**values, "reduction": Reduction.from_plain(values["reduction"])})


def decide(training: Training, plan: Plan, device: torch.device) -> Decision:
    """Returns how the training is checked under a small plan. Nothing of the training is changed."""
    with preserve_generators():
        try:
            return _decide(training, plan, device)
        except Exception as error:  # whatever the code of a model raises; the training itself will report it
            return Decision(problem=first_line(error))


def _decide(training: Training, plan: Plan, device: torch.device) -> Decision:
    blocks = Reduction(removable_blocks(training.model, plan))
    step = fake_step_or_none(training, blocks)
    if step is None and blocks.removed:  # a model that indexes its blocks by number fails without some
        blocks = Reduction()
        step = fake_step_or_none(training, blocks)
    digest = check_digest(training, plan, step, device.type) if step else None
    if digest is not None and is_kept(digest):
        return Decision(digest, kept=True)
    has_loss = step.returns_loss if step else True
    problem: str | None = None
    for reduction in _reductions(training, plan, blocks, step, device):
        for dtype in ("fp64", "fp32"):
            decision = Decision(digest, reduction=replace(reduction, dtype=dtype), has_loss=has_loss)
            try:
                _try(make_request(training, plan, decision), device)
                return decision
            except Exception as error:  # blocks that a model indexes by number, or operators without fp64, for example
                problem = problem or first_line(error)
    return Decision(digest, problem=problem or "it would take too long or too much memory, however small it is made")


def _reductions(
    training: Training, plan: Plan, blocks: Reduction, step: FakeStep | None, device: torch.device
) -> Iterator[Reduction]:
    """Yields what may be left out of the check, the best choice first: as little as possible within `_ENOUGH_S`."""
    whole = Reduction()
    candidates = [whole, blocks]
    if step is None or _seconds(training, plan, blocks, blocks, step, device) > _ENOUGH_S:
        shorter = replace(blocks, lengths=_shorter_lengths(training, plan, blocks))
        vocabularies = large_vocabularies(training.model)
        smaller = replace(shorter, vocabularies=vocabularies)
        candidates += [shorter, replace(whole, lengths=shorter.lengths), smaller]
        if step is not None and _seconds(training, plan, smaller, blocks, step, device) > _ENOUGH_S:
            candidates.append(replace(smaller, widths=_narrower_widths(training, smaller)))
    estimates = {id(item): _seconds(training, plan, item, blocks, step, device) for item in candidates}
    enough = [item for item in candidates if estimates[id(item)] <= _ENOUGH_S]
    rest = sorted((item for item in candidates if item not in enough), key=lambda item: estimates[id(item)])
    for item in (*enough, *rest):
        if estimates[id(item)] <= _MOST_S and _fits(training, plan, item):
            yield item


def _seconds(
    training: Training, plan: Plan, item: Reduction, traced: Reduction, step: FakeStep | None, device: torch.device
) -> float:
    """Estimates how long the check takes, from the FLOPs of the `step` that was traced under another reduction."""
    weights = parameter_count(training.model, item)
    flops = step.flops if step else 0.0
    flops *= weights / max(1, parameter_count(training.model, traced))
    for size, shorter in item.lengths.items():
        flops *= shorter / size
    compute_s = _PASSES * STEPS * samples_of_check(plan) * flops / _FLOPS_PER_S.get(device.type, 8e9)
    return compute_s + STEPS * weights * _S_PER_WEIGHT


def _fits(training: Training, plan: Plan, item: Reduction) -> bool:
    """Whether the ranks' copies of the model and those of the reference fit into the memory of this machine."""
    needed = parameter_count(training.model, item) * _BYTES_PER_WEIGHT * (plan.world_size + 2)
    return needed < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _shorter_lengths(training: Training, plan: Plan, blocks: Reduction) -> dict[int, int]:
    """Returns the dimensions of the batch that can be cut, by their sizes, and the sizes that they are cut to."""
    parts = 2 * plan.axes.context * plan.axes.tensor
    length = -(-_LENGTH // parts) * parts
    lengths: dict[int, int] = {}
    for size in longest_sizes(training.sample_batch, length):
        tried = {**lengths, size: length}
        if runs_forward(training, replace(blocks, lengths=tried)):
            lengths = tried
    return lengths


def _narrower_widths(training: Training, item: Reduction) -> dict[int, int]:
    """Returns the sizes of wide layers with which the model still runs if they are small, and the sizes that they are
    made: those first that most weights belong to."""
    skipped = {id(p) for name in item.removed for p in training.model.get_submodule(name).parameters()}
    widths: dict[int, int] = {}
    for size in wide_sizes(training.model, frozenset(skipped))[:_WIDTHS_TRIED]:
        tried = replace(item, widths={**widths, size: NARROW})
        if runs_forward(training, tried):
            widths = dict(tried.widths)
    return widths


def make_request(training: Training, plan: Plan, decision: Decision, times: int = 1) -> ProofRequest:
    """Returns the request of the proof that checks the training, with so many times as many samples as usual."""
    small = reduced_training(training, decision.reduction)
    batch, loss, target = small.sample_batch, small.loss, small.target
    if not decision.has_loss:
        batch, loss = with_target(batch, batch_size(batch)), stand_in_loss
        target = TARGET if isinstance(batch, dict) else None
    samples = times * samples_of_check(plan)
    steps = STEPS if parameter_count(small.model) <= _ONE_STEP_WEIGHTS else 1
    data = SampleDataset(batch, steps * samples)
    user_model = UserModel(
        model=small.model,
        optimizer=small.optimizer,
        loss=loss,
        data=data,
        global_batch=samples,
        collate=data.collate,
        clip_norm=small.clip_norm,
        seed=small.seed,
        target=target,
        timeout_s=small.timeout_s,
    )
    smaller = reduced_plan(plan, training.model, decision.reduction)
    return ProofRequest(user_model, smaller, steps, decision.reduction.dtype)


def _try(request: ProofRequest, device: torch.device) -> None:
    """Computes one step of the request on one device."""
    setup = build_setup(request)
    setup.model.train()
    grouping = choose_grouping(setup.model, request.plan, request.dropout, setup.compares_samples)
    reference = Reference(setup, request, grouping, device)
    reference.compute(reference.next_batch())
