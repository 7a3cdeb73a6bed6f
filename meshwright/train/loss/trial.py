"""Finds out by trying what a loss is: a mean over samples, a mean over valid targets, a sum, or none of these.

The loss of a whole batch is compared with the losses of its samples one by one. A loss function is tried on random
outputs in the form of the model's, so the model is not run. A model that computes its loss itself is run in evaluation
mode, or in training mode if it returns no loss otherwise, without gradients. A loss that is none of the above compares
samples with each other: under data parallelism it must see the samples of all ranks together.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.batch import WHOLE_BATCH, listed_samples, split_batch, take_listed
from meshwright.errors import InputError
from meshwright.profile.tracing.real_tensors import model_device
from meshwright.train.loss.cross_entropy import CountTargets
from meshwright.train.loss.joined import JoinedLoss, count_rows
from meshwright.train.loss.loss import Loss, LossFunction, classify_loss, loss_from_model
from meshwright.train.loss.output_form import FakeModel, OutputForm
from meshwright.train.torch_private import (
    AnyBatchNorm,
    AnyDropout,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

_SAMPLES = 5  # of a trial; the samples of the sample batch are repeated
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-6}
_MODEL_TOLERANCE = 1e-3  # the model runs in the precision of its weights
_LARGEST_TRIED = 2 * 10**8  # parameters: a larger model is not run for a trial
_CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x, torch.sigmoid, lambda x: x.softmax(-1))


def find_loss(function: LossFunction, model: FakeModel, sample: Any, target_key: str | None) -> Loss:
    """Returns the `Loss` that says what a loss function is a mean over, tried on the targets of the sample batch. A
    function that cannot be tried is taken as a mean over samples."""
    loss = classify_loss(function)
    if loss.kind != "samples" or is_from_torch(function):
        return loss
    form = model.output_form(sample, _SAMPLES, target_key)
    if form is None:
        return loss
    target = _repeat_samples(split_batch(sample, target_key).target, _SAMPLES)
    for dtype in _TOLERANCES:
        for change in _CHANGES:
            output = form.make(torch.Generator().manual_seed(0), dtype, change)
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    return _Trial(loss, form, output, _in_dtype(target, dtype), _TOLERANCES[dtype]).result()
            except InputError:
                raise
            except Exception:  # whatever the function raises on values that its model would not return
                continue
    return loss


def find_model_loss(model: nn.Module, sample: Any) -> Loss:
    """Returns the `Loss` for a model that computes its loss itself, tried on the samples of the sample batch, one by
    one and together. The model is not changed. It runs in evaluation mode or, if it returns no loss there, in training
    mode. A model that cannot be tried, because it is on the meta device or too large, gets the result of
    `loss_from_model`, and so do torchvision's detectors, whose losses are known."""
    loss = loss_from_model(model)
    parameters = list(model.parameters())
    is_large = sum(p.numel() for p in parameters) > _LARGEST_TRIED
    if loss.kind == "terms" or is_large or any(p.is_meta for p in parameters):
        return loss
    device = model_device(model)
    batch = tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, _repeat_samples(sample, 2))
    for training in (False, True):
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), _in_mode(model, training):
                whole = _model_loss(loss, model, batch)
                parts = [_model_loss(loss, model, _rows(batch, row, 2)) for row in range(2)]
            return _divided(loss, whole, parts)
        except Exception:  # whatever the model's own code raises, and a model that returns no loss in this mode
            continue
    return loss


def _divided(loss: Loss, whole: Any, parts: list[Any]) -> Loss:
    """Returns the `Loss` of a model whose loss is `whole` for a batch, and `parts` for the samples of the batch."""
    if isinstance(whole, tuple):
        is_divisible = _close(whole[0], sum(part[0] for part in parts), _MODEL_TOLERANCE)
    elif _close(whole, sum(parts), _MODEL_TOLERANCE):
        return replace(loss, kind="sum")
    else:
        is_divisible = _close(whole, sum(parts) / len(parts), _MODEL_TOLERANCE)
    return replace(loss, is_divisible=is_divisible)


@contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Within this context, the model is in training or evaluation mode; its BatchNorm and dropout layers are in
    evaluation mode always, because they would make the loss of a sample depend on the other samples or on chance. After
    it, the modes and the buffers are as they were."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()] if training else []
    try:
        for module in modes:
            module.training = training and not isinstance(module, AnyBatchNorm | AnyDropout)
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for buffer, values in buffers:
            buffer.copy_(values)


def _model_loss(loss: Loss, model: nn.Module, batch: Any) -> Any:
    inputs = split_batch(batch, WHOLE_BATCH)
    with loss.forward_context():
        output = model(*inputs.arguments, **inputs.keywords)
    return loss.function(output, inputs.target)


def is_from_torch(function: Any) -> bool:
    """Whether this is one of torch's own losses, whose means are over samples unless `classify_loss` knows better."""
    while isinstance(function, partial):
        function = function.func
    module = type(function).__module__ if isinstance(function, nn.Module) else getattr(function, "__module__", "")
    return module in ("torch.nn.modules.loss", "torch.nn.functional")


class _Trial:
    """One loss function, and the outputs and targets of a few samples."""

    def __init__(self, loss: Loss, form: OutputForm, output: Any, target: Any, tolerance: float) -> None:
        self._loss = loss
        self._form = form
        self._output = output
        self._target = target
        self._tolerance = tolerance

    def result(self) -> Loss:
        function = self._loss.function
        value, parts = self._values(function, self._target)
        if isinstance(value, tuple):  # a sum and a count, which must be those of its samples
            pairs = zip(*parts, strict=True)
            return self._loss if all(map(self._close, value, map(sum, pairs))) else self._joined()
        if not self._close(function(self._output, self._target), value):
            return self._loss  # it draws random numbers
        if self._close(value, sum(parts)):
            return replace(self._loss, kind="sum")
        counted = returns_sum_and_count(function)
        if self._counts_targets(counted, value):
            return replace(self._loss, function=counted)
        for leaf in range(len(tree_leaves(self._target))):
            weighted = WeightedByMask(function, leaf)
            if self._is_mask(leaf) and self._is_weighted(weighted):
                return replace(self._loss, function=weighted)
        return self._loss if self._close(value, sum(parts) / len(parts)) else self._joined()

    def _values(self, function: LossFunction, target: Any) -> tuple[Any, list[Any]]:
        """Returns the loss of all samples together, and those of the samples one by one."""
        parts = [function(self._form.rows(self._output, row), _rows(target, row, _SAMPLES)) for row in range(_SAMPLES)]
        return function(self._output, target), parts

    def _counts_targets(self, counted: LossFunction, value: Tensor) -> bool:
        """Whether the loss is the mean of cross entropies over their valid targets."""
        try:
            total, parts = self._values(counted, self._target)
        except _NoCount:
            return False
        return self._close(total[0] / total[1], value) and self._close(total[0], sum(part[0] for part in parts))

    def _is_mask(self, leaf: int) -> bool:
        """Whether a tensor of the target has zeros and ones only, several for each sample."""
        value = tree_leaves(self._target)[leaf]
        if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[0] != _SAMPLES or not value.any():
            return False
        return bool(((value == 0) | (value == 1)).all())

    def _is_weighted(self, weighted: "WeightedByMask") -> bool:
        """Whether the loss is a mean over the places where a mask is 1. Other places of the mask are set to 0 first, so
        that samples have different numbers of ones."""
        leaves, structure = tree_flatten(self._target)
        mask = leaves[weighted.leaf].clone()
        for row in range(_SAMPLES):  # row k keeps a part of its ones
            ones = mask[row].flatten().nonzero().flatten()
            mask[row].view(-1)[ones[: len(ones) * row // (2 * _SAMPLES)]] = 0
        leaves[weighted.leaf] = mask
        target = tree_unflatten(leaves, structure)
        total, parts = self._values(weighted, target)
        counts = {float(part[1]) for part in parts}
        equal = self._close(total[0], sum(part[0] for part in parts))
        unweighted, means = self._values(weighted.function, target)
        is_mean = self._close(unweighted, sum(means) / len(means))
        return equal and len(counts) > 1 and not is_mean

    def _joined(self) -> Loss:
        if any(dim not in (0, None) for dim in self._form.sample_dims):
            raise InputError(
                "the loss compares the samples of a batch with each other, and the model's output has its samples in"
                " another dimension than the first: return outputs whose first dimension is the samples"
            )
        has_samples = tuple(dim == 0 for dim in self._form.sample_dims)
        return Loss(JoinedLoss(self._loss.function, has_samples), "compares_samples")

    def _close(self, a: Any, b: Any) -> bool:
        return _close(a, b, self._tolerance)


class _NoCount(Exception):
    """A loss function called no cross entropy, or several with different numbers of targets."""


def returns_sum_and_count(function: LossFunction) -> LossFunction:
    """Returns a loss function that returns a pair: the value of `function` times the number of targets of the cross
    entropies that it calls, and this number."""
    return partial(_sum_and_count, function)


def _sum_and_count(function: LossFunction, output: Any, target: Any) -> tuple[Tensor, Any]:
    with CountTargets() as mode:
        value = function(output, target)
    if not mode.counts or any(count is not mode.counts[0] and count != mode.counts[0] for count in mode.counts):
        raise _NoCount
    return value * mode.counts[0], mode.counts[0]


class WeightedByMask:
    """A loss function that returns a pair: the value of `function`, which is a mean over the places where a mask is 1,
    times the number of these places, and this number. `leaf` is the number of the mask among the target's tensors."""

    def __init__(self, function: LossFunction, leaf: int) -> None:
        self.function = function
        self.leaf = leaf

    def __call__(self, output: Any, target: Any) -> tuple[Tensor, Tensor]:
        count = tree_leaves(target)[self.leaf].sum()
        return self.function(output, target) * count, count


# ---- samples


def _repeat_samples(target: Any, samples: int) -> Any:
    listed = listed_samples(target)
    if listed is not None:
        return take_listed(target, [row % listed for row in range(samples)])
    size = count_rows(target)

    def repeat(value: Any) -> Any:
        if not _has_rows(value) or value.shape[0] != size:
            return value
        return value.detach().cpu()[[row % size for row in range(samples)]]

    return tree_map(repeat, target)


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _rows(target: Any, row: int, samples: int) -> Any:
    if listed_samples(target) is not None:
        return take_listed(target, [row])

    def pick(value: Any) -> Any:
        return value[row : row + 1] if _has_rows(value) and value.shape[0] == samples else value

    return tree_map(pick, target)


def _in_dtype(target: Any, dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(cast, target)


def _close(a: Any, b: Any, tolerance: float) -> bool:
    a, b = float(a), float(b)
    return abs(a - b) <= tolerance * max(abs(a), abs(b))
