"""Decides whether ranks collate whole batches and take their rows, because a collate function depends on the batch
(data/collate/dependence.py).

Most such functions pad to the longest sample. Padding that the model masks and the loss ignores changes nothing, and
each rank then pads to its own longest sample, which computes less. Whether it changes the loss is tried with two small
samples s, t and a large one l, in evaluation mode:

    loss of collate([s, t])   against   loss of rows 0 and 1 of collate([s, t, l])                      _changes_loss

Equal losses show something only if the loss depends on the inputs at all, which it does not where a model begins with a
last layer of zeros. So a third pass has the inputs of t and l with the targets of s and t, and if the loss stays the
same, nothing was shown. Where nothing is shown, or the trial cannot run, ranks collate whole batches: that is right in
any case.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.data.collate.dependence import BatchDependence, find_dependence
from meshwright.data.collate.rows import take_rows
from meshwright.data.loading import LoadingOptions, is_stream
from meshwright.data.randomness import preserve_generators
from meshwright.errors import InputError
from meshwright.model_io.batch import TARGET_KEYS, ModelBatch
from meshwright.parallel.model import ParallelModel
from meshwright.train.loss.loss import Loss
from meshwright.user.code import line_of_function

# What rounding changes in a loss, by its dtype: larger differences are taken for those of padding.
_ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-5}
_ROUNDING_OF_HALVES = 2e-3  # if the model computes in bf16 or fp16
_SHOWN_ABOVE = 10.0  # times the rounding: a smaller change by other inputs shows nothing

MakeExample = Callable[[Any, int | None], ModelBatch]


class Collation:
    """Chooses how a session's loaders collate, once for each data set and collate function."""

    def __init__(self, parallel: ParallelModel) -> None:
        self._parallel = parallel
        self._chosen: dict[tuple[int, int], tuple[Any, bool]] = {}

    def choose(
        self,
        dataset: Any,
        loading: LoadingOptions,
        seed: int,
        ranks: int,
        changes_loss: Callable[[BatchDependence], bool | None],
    ) -> LoadingOptions:
        """Returns the loading options with `whole_batches` if it is needed. `ranks` is the number of ranks that divide
        a batch. `changes_loss` says whether it changes the loss that the function depends on the batch, and None if
        that cannot be said. All ranks call this together."""
        if loading.collate is None or loading.whole_batches or ranks * self._parallel.plan.microbatches == 1:
            return loading
        key = (id(dataset), id(loading.collate))
        if key not in self._chosen:
            needs_whole = self._needs_whole_batches(dataset, loading, seed, changes_loss)
            self._chosen[key] = (loading.collate, needs_whole)  # kept, so that no other object gets its id
        return replace(loading, whole_batches=self._chosen[key][1])

    def _needs_whole_batches(
        self,
        dataset: Any,
        loading: LoadingOptions,
        seed: int,
        changes_loss: Callable[[BatchDependence], bool | None],
    ) -> bool:
        assert loading.collate is not None
        if is_stream(dataset):  # all ranks read all of its samples anyway, and it may not begin anew after a trial
            return True
        dependence = find_dependence(dataset, loading.collate, seed)
        if dependence is None:
            return False
        changes = changes_loss(dependence)
        if changes is not False and loading.partition == "sample":
            if changes is None:
                return False  # a rank cannot read the others' samples, and nothing shows that it is wrong
            raise InputError(
                f"{_describe(loading.collate)} {_what_it_does(dependence)}, which changes the loss, and with"
                " data.partition: sample a rank cannot collate the samples of other ranks: set it to batch, or give all"
                " samples the same size"
            )
        return changes is not False


def changes_loss(
    parallel: ParallelModel,
    loss: Loss,
    make_example: MakeExample,
    collate: Callable[[list[Any]], Any],
    dependence: BatchDependence,
) -> bool | None:
    """Whether the loss of two samples depends on a third one in their batch; None if that cannot be tried. All ranks
    call this together."""
    plan = parallel.plan
    divides_passes = plan.axes.pipeline > 1 or plan.axes.context > 1 or plan.axes.expert > 1
    if divides_passes or plan.compute.compile != "none" or loss.kind in ("compares_samples", "terms"):
        return None
    try:
        terms = _loss_terms(parallel, loss, make_example, collate, dependence)
    except Exception:  # the model does not take such a batch: nothing is shown
        return None
    if terms is None:
        return None
    rounding = _ROUNDING[terms[0][2]] if plan.numerics.precision == "fp32" else _ROUNDING_OF_HALVES
    return _differ(terms[0], terms[1], rounding) or not _differ(terms[1], terms[2], rounding * _SHOWN_ABOVE)


def _loss_terms(
    parallel: ParallelModel,
    loss: Loss,
    make_example: MakeExample,
    collate: Callable[[list[Any]], Any],
    dependence: BatchDependence,
) -> list[tuple[Tensor, Tensor, torch.dtype]] | None:
    """Returns sum, count and dtype of the loss of both small samples alone, within a batch, and with other inputs; None
    if the model returns no loss."""
    whole = collate([*dependence.small, dependence.large])
    alone = make_example(collate([*dependence.small]), None)
    within, others = (make_example(take_rows(whole, range(first, first + 2), 3), None) for first in (0, 1))
    terms = []
    with torch.no_grad(), _evaluating(parallel), preserve_generators():
        for example in (alone, within, _with_targets(others, within)):
            with loss.forward_context(True):
                output = parallel.evaluate(example)
            if not loss.is_in(output):
                return None
            total, count = loss.sum_and_count(output, example.target, 2)
            terms.append((total.double().cpu(), torch.as_tensor(count).double().cpu(), total.dtype))
    return terms


@contextmanager
def _evaluating(parallel: ParallelModel) -> Iterator[None]:
    """Within this context, the model is in evaluation mode."""
    modules = [*parallel.runner.modules()]
    modes = [module.training for module in modules]
    parallel.train(False)
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        parallel.reshard()


def _differ(first: tuple[Any, ...], second: tuple[Any, ...], rounding: float) -> bool:
    """Whether sums or counts of two losses differ by more than rounding. NaN differs from everything."""
    same_sum = bool((first[0] - second[0]).abs() <= rounding * first[0].abs())
    return not same_sum or bool(first[1] != second[1])


def _with_targets(example: ModelBatch, other: ModelBatch) -> ModelBatch:
    """Returns the example with the targets of another one."""
    keywords = {
        name: other.keywords[name] if name in TARGET_KEYS else value for name, value in example.keywords.items()
    }
    return replace(example, keywords=keywords, target=other.target)


def _describe(collate: Any) -> str:
    """`collate_fn pad (my_data.py, line 12)`."""
    function = getattr(collate, "func", collate)
    written = function if hasattr(function, "__code__") else getattr(type(function), "__call__", None)  # noqa: B004
    line = line_of_function(written)
    name = getattr(function, "__name__", type(function).__name__)
    return f"the collate function {name}" + (f" ({line})" if line else "")


def _what_it_does(dependence: BatchDependence) -> str:
    return "pads to the longest sample of a batch" if dependence.pads else "computes from the whole batch"
