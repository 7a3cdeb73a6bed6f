"""Finds out by trying what a loss is: a mean over samples, a mean over valid targets, a sum, or none of these.

The loss of a whole batch is compared with the losses of its samples one by one. A loss function is tried on random
outputs in the form of the model's, so the model is not run. A model that computes its loss itself is run in evaluation
mode, or in training mode if it returns no loss otherwise, without gradients. A loss that is none of the above compares
samples with each other: under data parallelism it must see the samples of all ranks together.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.errors import InputError
from meshwright.model_io.batch import WHOLE_BATCH, split_batch
from meshwright.profile.experts import find_expert_layers
from meshwright.profile.tracing.real_tensors import model_device
from meshwright.train.loss.cross_entropy import Count, CountedMean, CountTargets, FindIgnoredTargets
from meshwright.train.loss.joined import JoinedLoss
from meshwright.train.loss.loss import (
    Loss,
    LossFunction,
    ModelLoss,
    check_returned_count,
    classify_loss,
    loss_from_model,
)
from meshwright.train.loss.output_form import FakeModel, OutputForm, shorten_sequences, warn_untried
from meshwright.train.loss.target_counts import COUNTS, CountedByTarget, has_rows, shorten_one_row, varied_targets
from meshwright.train.loss.target_rows import in_dtype, repeat_samples, sample_rows
from meshwright.train.torch_private import (
    AnyBatchNorm,
    AnyDropout,
    tree_leaves,
    tree_map,
)

_SAMPLES = 5  # of a trial; the samples of the sample batch are repeated
_DRAWS = 8  # of a loss that draws random numbers
# In fp64 first, which tells apart losses that are nearly equal; functions with fp32 constants may only run in fp32.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_MODEL_TOLERANCE = 1e-3  # the model runs in the precision of its weights
_MIXTURE_TOLERANCE = 1e-5  # in fp32: a loss that balances experts may have a small factor
_LARGEST_TRIED = 2 * 10**8  # parameters: a larger model is not run for a trial
_CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x, torch.sigmoid, lambda x: x.softmax(-1))


def find_loss(function: LossFunction, model: FakeModel, sample: Any, target_key: str | None) -> Loss:
    """Returns the `Loss` that says what a loss function is a mean over, tried on the targets of the sample batch. A
    model that decides by values of tensors is run on them. A function that cannot be tried is taken as a mean over
    samples."""
    loss = classify_loss(function)
    if loss.kind != "samples" or is_from_torch(function):
        return loss
    batches = [repeat_samples(sample, samples) for samples in (_SAMPLES, _SAMPLES + 1)]
    form = model.output_form(sample, _SAMPLES, target_key) or model.real_form(batches, _SAMPLES, target_key)
    if form is None:
        warn_untried("the model cannot run on a few samples")
        return loss
    form, target = shorten_sequences(form, repeat_samples(split_batch(sample, target_key).target, _SAMPLES))
    for dtype in _TOLERANCES:
        for change in _CHANGES:
            output = form.make(torch.Generator().manual_seed(0), dtype, change)
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    return _Trial(loss, form, output, in_dtype(target, dtype), _TOLERANCES[dtype]).result()
            except InputError:
                raise
            except Exception:  # whatever the function raises on values that its model would not return
                continue
    warn_untried("it fails on random values in the form of the model's output")
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
    batch = tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, repeat_samples(sample, 2))
    for training in (False, True):
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), _in_mode(model, training), _left_out(loss):
                cases = [_model_losses(loss, model, rows) for rows in (batch, shorten_one_row(batch))]
            return _divided(loss, cases, _tolerance(model))
        except Exception:  # whatever the model's own code raises, and a model that returns no loss in this mode
            continue
    return loss


def _left_out(loss: Loss) -> AbstractContextManager[None]:
    """Leaves out load-balancing losses of routers, which are computed over all ranks."""
    function = loss.function
    routers = function.routers if isinstance(function, ModelLoss) else None
    return routers.left_out() if routers is not None else nullcontext()


def _tolerance(model: nn.Module) -> float:
    is_precise = all(p.dtype not in (torch.bfloat16, torch.float16) for p in model.parameters())
    return _MIXTURE_TOLERANCE if is_precise and find_expert_layers(model) else _MODEL_TOLERANCE


def _divided(loss: Loss, cases: list[list[Any]], tolerance: float) -> Loss:
    """Returns the `Loss` of a model whose losses were tried on two batches: each of `cases` has the loss of a whole
    batch, and those of its samples."""
    if isinstance(cases[0][0], CountedMean):
        sums = ([result.total for result in case] for case in cases)
        return replace(loss, is_divisible=all(_close(whole, sum(parts), tolerance) for whole, *parts in sums))
    telling = [values for values in cases if math.isfinite(values[0]) and any(values)]
    if telling and all(_close(whole, sum(parts), tolerance) for whole, *parts in telling):
        return replace(loss, kind="sum")
    is_mean = all(_close(whole, sum(parts) / len(parts), tolerance) for whole, *parts in telling)
    return replace(loss, is_divisible=is_mean)


def _model_losses(loss: Loss, model: nn.Module, batch: Any) -> list[Any]:
    """Returns the loss of two samples together, and the losses of each."""
    return [_model_loss(loss, model, rows) for rows in (batch, *(sample_rows(batch, row, 2) for row in range(2)))]


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
    with loss.forward_context(True):
        output = model(*inputs.arguments, **inputs.keywords)
    return loss.function(output, inputs.target)


def is_from_torch(function: Any) -> bool:
    """Whether this is one of torch's own losses, whose means are over samples unless `classify_loss` knows better."""
    while isinstance(function, partial):
        function = function.func
    module = type(function).__module__ if isinstance(function, nn.Module) else getattr(function, "__module__", "")
    return module in ("torch.nn.modules.loss", "torch.nn.functional")


@dataclass(frozen=True)
class _Case:
    """Targets for the samples of a trial, the loss of all samples together, and the sum and the count of each sample: a
    pair that the function returned, or its value and 1. `ignores` says whether a cross entropy that is a mean ignores
    one of the targets."""

    target: Any
    value: float
    parts: list[tuple[float, float]]
    ignores: bool

    @property
    def is_telling(self) -> bool:
        """Whether sums and means of the parts differ, and can be compared with the value."""
        return math.isfinite(self.value) and any(total != 0 for total, _ in self.parts)


class _Trial:
    """One loss function, and the outputs and targets of a few samples."""

    def __init__(self, loss: Loss, form: OutputForm, output: Any, target: Any, tolerance: float) -> None:
        self._loss = loss
        self._form = form
        self._output = output
        self._tolerance = tolerance
        self._first = self._case(target)

    def result(self) -> Loss:
        first, value = self._first, self._value(self._first.target)
        if math.isfinite(value) and not self._close(first.value, value):
            return self._random()
        cases = [case for case in (first, *self._varied_cases()) if case.is_telling]
        without_ignored = cases if first.ignores else [case for case in cases if not case.ignores]
        if without_ignored:
            for holds, loss in self._candidates():
                # With a count of the targets that are not ignored, it may ignore some that the sample batch does not.
                if all(map(holds, cases if loss.function is self._counted else without_ignored)):
                    return loss
        return self._joined()

    def _candidates(self) -> Iterator[tuple[Callable[[_Case], bool], Loss]]:
        """What the loss may be, each with a function that says whether it is so in a case. Earlier ones are preferred
        where the cases do not tell them apart."""
        function = self._loss.function
        if not self._returns_pairs:
            yield self._is_sum, replace(self._loss, kind="sum")
            yield self._counts_targets, replace(self._loss, function=self._counted)
        yield self._is_mean, replace(self._loss, function=self._without_ignored_targets(), whole=function)
        for leaf, value in enumerate(tree_leaves(self._first.target)):
            for rule in COUNTS if has_rows(value, _SAMPLES) else ():
                counted = CountedByTarget(function, leaf, rule)
                yield partial(self._is_counted, counted), replace(self._loss, function=counted)

    def _is_sum(self, case: _Case) -> bool:
        return self._close(case.value, sum(total for total, _ in case.parts))

    def _is_mean(self, case: _Case) -> bool:
        """Whether the loss is the mean over samples, or the quotient of the sums of its pairs."""
        return self._is_quotient(case, case.parts)

    def _counts_targets(self, case: _Case) -> bool:
        """Whether the loss is the mean of cross entropies over their valid targets."""
        try:
            parts = [self._counted(*self._rows(case.target, row)) for row in range(_SAMPLES)]
        except _NoCount:
            return False
        return self._is_quotient(case, [(float(part.total), float(part.number)) for part in parts])

    def _is_counted(self, counted: CountedByTarget, case: _Case) -> bool:
        """Whether the loss is a mean over numbers of the target."""
        counts = [float(counted.count(sample_rows(case.target, row, _SAMPLES))) for row in range(_SAMPLES)]
        values = [total if count else 0.0 for (total, _), count in zip(case.parts, counts, strict=True)]
        return self._is_quotient(case, [(value * count, count) for value, count in zip(values, counts, strict=True)])

    def _is_quotient(self, case: _Case, parts: list[tuple[float, float]]) -> bool:
        """Whether the loss of all samples follows from sums and counts, as training combines those of ranks."""
        count = sum(count for _, count in parts)
        return count != 0 and self._close(case.value, sum(total for total, _ in parts) / count)

    def _varied_cases(self) -> Iterator[_Case]:
        """Yields a case for each varied target that changes the loss and that the function accepts."""
        for target, is_class in varied_targets(self._first.target, _SAMPLES):
            try:
                with nullcontext() if is_class else _RefuseCtcLoss():
                    if self._value(target) != self._first.value:
                        yield self._case(target)
            except Exception:  # whatever the function raises on targets that no data set has
                continue

    def _case(self, target: Any) -> _Case:
        with FindIgnoredTargets() as mode:
            value = self._value(target)
        parts = []
        for row in range(_SAMPLES):
            result = self._loss.function(*self._rows(target, row))
            total, count = result if isinstance(result, tuple) else (result, 1)
            check_returned_count(float(count))
            parts.append((float(total), float(count)))
        return _Case(target, value, parts, mode.ignores)

    def _value(self, target: Any) -> float:
        """The loss of all samples together."""
        result = self._loss.function(self._output, target)
        return float(result[0] / result[1]) if isinstance(result, tuple) else float(result)

    def _rows(self, target: Any, row: int) -> tuple[Any, Any]:
        return self._form.rows(self._output, row), sample_rows(target, row, _SAMPLES)

    @cached_property
    def _counted(self) -> LossFunction:
        return returns_counted_mean(self._loss.function)

    @cached_property
    def _returns_pairs(self) -> bool:
        return isinstance(self._loss.function(self._output, self._first.target), tuple)

    def _without_ignored_targets(self) -> LossFunction:
        """Returns the function. If it has cross entropies, but the sample batch has no target that they ignore, nobody
        knows whether it is a mean over samples with such targets, so these are refused."""
        function = self._loss.function
        with FindIgnoredTargets() as mode:
            function(self._output, self._first.target)
        return WithoutIgnoredTargets(function) if mode.flags and not mode.ignores else function

    def _random(self) -> Loss:
        """What a loss is that draws random numbers: a sum if the mean of several draws is nearer to that."""
        cases = [self._case(self._first.target) for _ in range(_DRAWS)]
        value = sum(case.value for case in cases)
        parts = sum(total / max(count, 1.0) for case in cases for total, count in case.parts)
        if not self._returns_pairs and abs(value - parts) < abs(value - parts / _SAMPLES):
            return replace(self._loss, kind="sum")
        try:
            self._counted(self._output, self._first.target)
        except (_NoCount, TypeError):
            return self._loss
        return replace(self._loss, function=self._counted)

    def _joined(self) -> Loss:
        if any(dim not in (0, None) for dim in self._form.sample_dims):
            raise InputError(
                "the loss is neither a mean nor a sum over samples or targets, so it needs the outputs of all ranks,"
                " but the samples are not the first dimension of the model's output: let the loss return a pair"
                " (sum, count), or the model outputs whose first dimension is the samples"
            )
        has_samples = tuple(dim == 0 for dim in self._form.sample_dims)
        return Loss(JoinedLoss(self._loss.function, has_samples), "compares_samples")

    def _close(self, a: Any, b: Any) -> bool:
        return _close(a, b, self._tolerance)


class WithoutIgnoredTargets:
    """A loss function with cross entropies that is a mean over samples while no target is ignored. Raises an
    `InputError` for a batch with ignored targets; on a GPU in the call after, so that no call waits for the device."""

    def __init__(self, function: LossFunction) -> None:
        self.function = function
        self._unread: list[Tensor] = []

    def __call__(self, output: Any, target: Any) -> Any:
        with FindIgnoredTargets() as mode:
            result = self.function(output, target)
        is_on_gpu = any(flag.is_cuda for flag in mode.flags)
        to_read, self._unread = (self._unread, mode.flags) if is_on_gpu else (mode.flags, [])
        if any(map(bool, to_read)):
            raise InputError(
                "the loss adds a cross entropy and other terms, which are means over different numbers where targets"
                " are ignored, but the sample batch has no ignored target: put a sample with ignored targets into it"
                " (in a job: among the first two), and the loss gets the outputs of all ranks; or use a plan without"
                " data parallelism and microbatches"
            )
        return result


class _RefuseCtcLoss(TorchFunctionMode):
    """Raises an error if torch's CTC loss is called: it reads outside of its input if a target is not a class."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "ctc_loss":
            raise ValueError("the CTC loss does not check its targets")
        return func(*args, **(kwargs or {}))


class _NoCount(Exception):
    """A loss function called no cross entropy, or several with different numbers of targets."""


def returns_counted_mean(function: LossFunction) -> LossFunction:
    """Returns a loss function that returns the value of `function` as a `CountedMean` over the targets of the cross
    entropies that it calls."""
    return partial(_counted_mean, function)


def _counted_mean(function: LossFunction, output: Any, target: Any) -> CountedMean:
    counts: list[Count] = []
    with CountTargets(counts):
        value = function(output, target)
    if not counts or any(count is not counts[0] and count != counts[0] for count in counts[1:]):
        raise _NoCount
    return CountedMean(value, counts[0])


def _close(a: Any, b: Any, tolerance: float) -> bool:
    a, b = float(a), float(b)
    return abs(a - b) <= tolerance * max(abs(a), abs(b))
