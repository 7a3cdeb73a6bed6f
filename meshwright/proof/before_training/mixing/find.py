"""Finds models that mix the samples of a batch: what they return for a sample depends on the other samples, on its
position or on the number of samples. Under a plan that divides batches, ranks and microbatches compute with some of the
samples only, and train another model.

A copy of the model with random weights runs on a few samples, in fp64 where it can (`rows.py` has the batches).
BatchNorm and dropout are in evaluation mode, because plans and seeds treat these. A model that draws other random
numbers is compared in evaluation mode, and in training mode with the same seed for batches of the same size. What has
no dimension that grows with the samples, such as a loss, is not compared here: `train/loss/trial.py` does that.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.data.randomness import preserve_generators, seed_generators
from meshwright.model_io.batch import ModelBatch, at_least_fp32, count_listed_samples, split_batch
from meshwright.plan import Plan
from meshwright.profile.fake import batch_size
from meshwright.proof.before_training.digest import check_digest
from meshwright.proof.before_training.fake_step import FakeStep, fake_step_or_none
from meshwright.proof.before_training.kept import is_kept, keep
from meshwright.proof.before_training.mixing.backward import backward_line
from meshwright.proof.before_training.mixing.copies import set_mode, with_drawn_weights, without_weights
from meshwright.proof.before_training.mixing.locate import locate
from meshwright.proof.before_training.mixing.rows import (
    Pairs,
    by_sample,
    compared_leaves,
    half_batches,
    is_same,
    replaced_batch,
    reversed_batch,
    sample_dims,
    whole_batch,
)
from meshwright.proof.before_training.reduction import (
    Reduction,
    longest_sizes,
    parameter_count,
    removable_blocks,
    shortened,
)
from meshwright.proof.before_training.training import Training
from meshwright.proof.before_training.vocabulary import large_vocabularies, narrow_tokens
from meshwright.proof.torch_private import refuse_collectives, tree_map

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}  # relative to the largest number of a tensor
_NUMBER_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}  # sums over samples are rounded otherwise in parts
_SMALL_FLOPS = 2e9  # of a step of one sample; above this the model is made smaller
_MOST_FLOPS = 2e10  # a trial with more is not made
_MOST_WEIGHTS = 2 * 10**8
_SAMPLES = (16, 4)  # of a trial, for small models and for others
_LENGTH = 64  # to which sequences and images are cut
_KEEP_ABOVE_S = 0.5  # trials that take less are made at each start


@dataclass(frozen=True)
class Mixing:
    """A module that mixes samples, empty for the whole model, and the line that does it; empty if it is not known.
    `in_backward`: it does so in its backward pass, or this is not linear in the gradients that it gets. `in_number`: an
    output without samples does so, which the loss function uses."""

    module: str
    line: str
    in_backward: bool = False
    in_number: bool = False

    def __str__(self) -> str:
        name = f"the module {self.module}" if self.module else "the model"
        mixes = f"{name} mixes the samples of a batch"
        if self.in_number:
            mixes = f"{name} returns a number that is not a mean over samples, and the loss uses it"
        if self.in_backward:
            mixes = f"the backward pass of {name} mixes the samples of a batch, or is not linear in its gradients"
        return mixes + (f" ({self.line})" if self.line else "")


def find_mixing(training: Training, device: torch.device) -> Mixing | None:
    """Returns where the model mixes samples; None if it does not, or if that cannot be tried. Nothing of the training
    is changed."""
    if count_listed_samples(training.sample_batch) is not None:
        return None
    begin = time.monotonic()
    # Other ranks do not run the trial, so nothing in it may wait for them.
    seeds = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with preserve_generators(), seeds, refuse_collectives():
        step = fake_step_or_none(training, Reduction())
        digest = check_digest(training, Plan(), step, f"{device.type}, samples") if step else None
        if digest is not None and is_kept(digest):
            return None
        for trial in _trials(training, step, device):
            try:
                mixing = trial.find()
            except Exception:  # whatever the model's code raises on such a batch, in this precision or without blocks
                continue
            seconds = time.monotonic() - begin
            if mixing is None and digest is not None and seconds > _KEEP_ABOVE_S:
                keep(digest, "samples are not mixed", 0.0, seconds)
            return mixing
    return None


def _trials(training: Training, step: FakeStep | None, device: torch.device) -> Iterator["_Trial"]:
    """Yields trials, the best first: of the whole model if it is small, otherwise of fewer blocks and short sequences.
    The next one is for models that the last one cannot run."""
    whole = Reduction()
    blocks = replace(
        whole,
        removed=removable_blocks(training.model, Plan()),
        vocabularies=large_vocabularies(training.model),
        lengths=dict.fromkeys(longest_sizes(training.sample_batch, _LENGTH), _LENGTH),
    )
    is_small = step is not None and step.flops < _SMALL_FLOPS and parameter_count(training.model) < 10**7
    reductions = [whole] if is_small else [blocks, replace(blocks, lengths={}), replace(blocks, removed=()), whole]
    weights = max(1, parameter_count(training.model))
    for reduction in reductions:
        count = parameter_count(training.model, reduction)
        flops = step.flops * count / weights if step and not reduction.lengths else 0.0
        if count > _MOST_WEIGHTS or flops > _MOST_FLOPS:
            continue
        # A loop with a loss of its own may call the model with the whole batch, or without its target.
        for key in dict.fromkeys((training.target_key, None)):
            for dtype in _TOLERANCES:
                yield _Trial(training, reduction, key, dtype, device, _SAMPLES[0 if is_small else 1])


@dataclass(frozen=True)
class _Trial:
    """A model, made small, and how it is run."""

    training: Training
    reduction: Reduction
    target_key: str | None
    dtype: torch.dtype
    device: torch.device
    most_samples: int

    def find(self) -> Mixing | None:
        """Raises whatever the model raises."""
        model, batch, size = self._model(), self._batch(), self._size
        other, _ = reversed_batch(batch, size)
        first, second = self._run(model, batch, True), self._run(model, other, True)
        different = self._different(model, batch, True, first, second)
        is_random = self._draws_numbers(model, batch)
        if different is None:
            return self._mixed_number(model, batch) or self._backward_mixing(model, batch, not is_random)
        if not is_random and self._is_repeated(model, batch, True, first, seed=1):
            return self._located(model, batch, different, True)
        if self._is_repeated(model, batch, True, first, seed=0):  # it draws random numbers
            replaced, same = replaced_batch(batch, size)
            dims = [_dim(a, b, (size, size + 1)) for a, b in zip(first, second, strict=True)]
            if not self._agrees(first, self._run(model, replaced, True), same, size, dims):
                return Mixing("", "")
        first, second = self._run(model, batch, False), self._run(model, other, False)
        different = self._different(model, batch, False, first, second)
        if different is None:
            return self._backward_mixing(model, batch, False)
        if not self._is_repeated(model, batch, False, first, seed=1):
            return None
        return self._located(model, batch, different, False)

    def _mixed_number(self, model: nn.Module, batch: Any) -> Mixing | None:
        """Returns the mixture of a number, or of another output without samples, that the loss function of the training
        uses, and that is not the mean of those of two parts of the batch. In evaluation mode: it may be random."""
        function = self.training.loss
        if function is None:  # `train/loss/trial.py` tries the losses that models compute
            return None
        inputs = split_batch(batch, self.target_key)
        set_mode(model, False)
        with torch.enable_grad():
            output = model(*inputs.arguments, **inputs.keywords)
            value = function(at_least_fp32(output), inputs.target)
        leaves = compared_leaves(output)
        total = value[0] if isinstance(value, tuple) else value
        uses = torch.autograd.grad(total.sum(), leaves, allow_unused=True) if total.requires_grad else ()
        parts = [(self._run(model, part, False), size) for part, _, size in half_batches(batch, self._size, cut=1)]
        for number, use in enumerate(uses):
            whole, of_parts = leaves[number].detach(), [(part[number], size) for part, size in parts]
            if use is None or any(part.shape != whole.shape for part, _ in of_parts):
                continue
            mean = sum((part * (size / self._size) for part, size in of_parts), torch.zeros_like(whole))
            if not is_same(whole[None], mean[None], [(0, 0)], _NUMBER_TOLERANCES[self.dtype]):
                return Mixing("", "", in_number=True)
        return None

    def _backward_mixing(self, model: nn.Module, batch: Any, training: bool) -> Mixing | None:
        """Returns the mixture of a backward pass, of a model whose forward pass mixes nothing."""

        def run() -> list[tuple[list[Tensor], Sequence[int | None]]]:
            batches = [(batch, self._size), *((half, size) for half, _, size in half_batches(batch, self._size))]
            outputs = [(self._outputs(model, rows, training, 0), size) for rows, size in batches]
            (whole, size), (part, part_size) = outputs[0], outputs[1]
            dims = [_dim(a, b, (size, part_size)) for a, b in zip(whole, part, strict=True)]
            return [(leaves, dims) for leaves, _ in outputs]

        line = backward_line(model, run, self._size, self.dtype)
        return None if line is None else Mixing("", line, in_backward=True)

    def _different(
        self, model: nn.Module, batch: Any, training: bool, first: list[Tensor], second: list[Tensor]
    ) -> tuple[Any, Pairs, int] | None:
        """Returns the batch with other numbers of samples for which the output differs, as `half_batches` does; None
        if there is none. `first` is the output for `batch`, and `second` that for the reversed one."""
        other, pairs = reversed_batch(batch, self._size)
        if not self._agrees(first, second, pairs, self._size + 1):
            return other, pairs, self._size + 1
        for half in half_batches(batch, self._size):
            if not self._agrees(first, self._run(model, half[0], training), *half[1:]):
                return half
        return None

    @property
    def _size(self) -> int:
        samples = batch_size(self.training.sample_batch)
        return max(4, min(samples, self.most_samples))

    def _model(self) -> nn.Module:
        model, build = self.training.model, self.training.build
        if build is not None and any(buffer.is_meta for buffer in model.buffers()):
            model = build(())
        empty = without_weights(model, self.reduction.removed)
        return with_drawn_weights(empty, self.reduction.vocabularies, self.dtype, self.device)

    def _batch(self) -> ModelBatch:
        """Returns the samples of the trial."""
        batch = self.training.sample_batch
        rows = whole_batch(batch, batch_size(batch), self._size)
        rows = narrow_tokens(shortened(rows, self.reduction.lengths), self.reduction.vocabularies)

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.detach().to(self.device, self.dtype if value.is_floating_point() else None)

        return tree_map(move, rows)

    def _run(self, model: nn.Module, batch: Any, training: bool, seed: int = 0) -> list[Tensor]:
        """Returns the tensors of the model's output for a batch."""
        return [leaf.detach() for leaf in self._outputs(model, batch, training, seed)]

    def _outputs(self, model: nn.Module, batch: Any, training: bool, seed: int) -> list[Tensor]:
        """Returns the tensors of the model's output for a batch, from which gradients can be computed."""
        inputs = split_batch(batch, self.target_key)
        set_mode(model, training)
        seed_generators(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        try:
            with torch.enable_grad():
                return compared_leaves(model(*inputs.arguments, **inputs.keywords))
        finally:
            with torch.no_grad():
                for buffer, values in buffers:
                    if not torch.equal(buffer, values):  # a backward pass may need the others as they are
                        buffer.copy_(values)

    def _agrees(
        self,
        first: list[Tensor],
        second: list[Tensor],
        pairs: Pairs,
        size: int,
        dims: list[int | None] | None = None,
    ) -> bool:
        """Whether outputs of two batches are the same for the same samples. `size` is the number of samples of the
        second batch."""
        sizes = (self._size, size)
        dims = dims or [_dim(a, b, sizes) for a, b in zip(first, second, strict=True)]
        for a, b, dim in zip(first, second, dims, strict=True):
            if dim is None:
                continue
            readings = zip(by_sample(a, dim, sizes[0]), by_sample(b, dim, sizes[1]), strict=True)
            if not any(is_same(x, y, pairs, _TOLERANCES[self.dtype]) for x, y in readings):
                return False
        return True

    def _draws_numbers(self, model: nn.Module, batch: Any) -> bool:
        """Whether the model draws random numbers in training mode, also if they rarely change what it returns."""

        def state() -> Tensor:
            return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

        self._run(model, batch, True)
        after = state()
        seed_generators(0)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(0)
        return not torch.equal(after, state())

    def _is_repeated(self, model: nn.Module, batch: Any, training: bool, output: list[Tensor], seed: int) -> bool:
        """Whether the model returns the same for the same batch again."""
        again = self._run(model, batch, training, seed)
        pairs = [(0, 0)]
        return len(again) == len(output) and all(
            is_same(a[None], b[None], pairs, _TOLERANCES[self.dtype]) for a, b in zip(output, again, strict=True)
        )

    def _located(self, model: nn.Module, batch: Any, different: tuple[Any, Pairs, int], training: bool) -> Mixing:
        other, pairs, size = different
        with suppress(Exception):  # nothing can be read of the tensors inside of `vmap`, for example
            place = locate(
                model,
                lambda is_other: self._run(model, other if is_other else batch, training),
                pairs,
                (self._size, size),
                _TOLERANCES[self.dtype],
            )
            return Mixing(*place) if place else Mixing("", "")
        return Mixing("", "")


def _dim(first: Tensor, second: Tensor, sizes: tuple[int, int]) -> int | None:
    """Returns the dimension of samples of an output. None if there is none, and for what compares samples with each
    other, such as the scores of CLIP, which have two."""
    dims = sample_dims(first, second, sizes)
    return dims[0] if len(dims) == 1 else None
