"""Faults that can be planted in the rules of the package: a missing reduction, a wrong offset, a rule that claims too
much. The fuzzer has to find each of them.

A fault replaces functions in this process for as long as a case runs. A function is replaced wherever a module of the
package has imported it.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

Change = Callable[[Any], Any]  # from a function of the package to the one that takes its place


@dataclass(frozen=True)
class Fault:
    """`place` is `module:name` or `module:class.name` in the package; `change` makes the faulty function. `plans` are
    the beginnings of the names of plans that the fault can affect."""

    place: str
    change: Change
    plans: tuple[str, ...]


@contextmanager
def plant(name: str) -> Iterator[None]:
    """Within this context, the package has the fault of this name."""
    fault = FAULTS[name]
    module_name, _, attribute = fault.place.partition(":")
    owner: Any = importlib.import_module(f"meshwright.{module_name}")
    *classes, function = attribute.split(".")
    for part in classes:
        owner = getattr(owner, part)
    original = getattr(owner, function)
    changed = fault.change(original)
    with ExitStack() as stack:
        if classes:
            stack.enter_context(patch.object(owner, function, changed))
        else:
            for module, where in _uses(original):
                stack.enter_context(patch.object(module, where, changed))
        yield


def _uses(function: Any) -> list[tuple[Any, str]]:
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("meshwright")]
    return [(m, name) for m in modules for name, value in list(vars(m).items()) if value is function]


# ---- faulty functions


def _returns_first(original: Any) -> Any:
    return lambda x, *_, **__: x


def _does_nothing(original: Any) -> Any:
    return lambda *_, **__: None


def _gradient_as_it_is(original: Any) -> Any:
    return staticmethod(lambda ctx, *grads: (grads[0], None))


def _averages(original: Any) -> Any:
    return lambda x, group: original(x, group) / group.size


def _own_part_of_own_tensor(original: Any) -> Any:
    def reduce_scatter(x: Tensor, ranges: Any, group: Any) -> Tensor:
        parts = [x.narrow(ranges.dim, first, length) for first, length in ranges.by_rank[group.rank]]
        return torch.cat(parts, ranges.dim).clone()

    return reduce_scatter


def _one_position_late(original: Any) -> Any:
    return lambda x, ranges, group: original(x.roll(1, ranges.dim), ranges, group)


def _reversed_shards(original: Any) -> Any:
    def concatenate(shards: Any, ranges: Any) -> Tensor:
        is_even = len({shard.shape for shard in shards}) == 1
        return original(shards[::-1] if is_even else shards, ranges)

    return concatenate


def _first_positions(original: Any) -> Any:
    def local_part(x: Tensor, spec: Any) -> Tensor:
        result = original(x, spec)
        return x.narrow(spec.shard.dim, 0, result.shape[spec.shard.dim]).clone()

    return local_part


def _all_keys(original: Any) -> Any:
    from meshwright.parallel.context.tiles import full_tiles

    return lambda queries, keys, device: full_tiles(queries, keys)


def _last_tile(original: Any) -> Any:
    def add(merged: Any, tile: Any, output: Tensor, log_sum: Tensor) -> None:
        begin, end = tile.queries
        is_first = bool((merged.log_sum[..., begin:end] == -torch.inf).all())
        original(merged, tile, output, log_sum)
        if not is_first:
            merged.output[..., begin:end, :].copy_(output)

    return add


def _gradients_times_ranks(original: Any) -> Any:
    def run(session: Any, *arguments: Any) -> Any:
        loss = original(session, *arguments)
        for parameter in session.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(session.plan.data_ranks)
        return loss

    return run


def _counts_samples(original: Any) -> Any:
    return lambda loss, target, samples: float(samples)


def _norm_of_this_rank(original: Any) -> Any:
    return lambda gradients, layouts, tied, mesh: original(gradients, layouts, tied, None)


def _own_statistics(original: Any) -> Any:
    from meshwright.parallel.replicate import batch_norm

    def statistics(input: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        mean, var, count = batch_norm._local_statistics(input)
        return mean, var, mean.new_tensor(count)

    return statistics


def _second_argument(original: Any) -> Any:
    return lambda exchange, leaf: leaf


def _rows_rolled(original: Any) -> Any:
    return lambda x, *arguments: original(x.roll(1, 0) if len(x) else x, *arguments)


def _without_last_chunk(original: Any) -> Any:
    return property(lambda targets: iter(list(original.fget(targets))[:-1]))


def _pointwise(*names: str) -> Change:
    """The rule that these functions leave positions where they are, so that each rank may run them on its part."""

    def change(original: Any) -> Any:
        def handle(func: Any, args: Any, kwargs: Any) -> Any:
            view: Any = args[0] if args else None
            spec = getattr(view, "spec", None)
            if spec is None or getattr(func, "__name__", "") not in names or any(map(_is_view, args[1:])):
                return original(func, args, kwargs)
            result = func(view.local_tensor, *args[1:], **kwargs)
            if not isinstance(result, Tensor) or result.shape != view.local_tensor.shape:
                return original(func, args, kwargs)
            return type(view)(result, spec, tuple(view.shape))

        return staticmethod(handle)

    return change


def _is_view(value: Any) -> bool:
    return hasattr(value, "local_tensor")


def _written_locally(original: Any) -> Any:
    """The rule that an index means the same on every rank."""

    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        if getattr(func, "__name__", "") != "__setitem__" or not _is_view(args[0]) or any(map(_is_view, args[1:])):
            return original(func, args, kwargs)
        try:
            return func(args[0].local_tensor, *args[1:], **kwargs)
        except IndexError:
            return original(func, args, kwargs)

    return staticmethod(handle)


_COLLECTIVES = "parallel.differentiable_collectives"
_SEQUENCE = "parallel.context.sequence_view:SequenceView.handler"
_SHARD = "parallel.tensor.shard_view:ShardView.handler"
_TENSOR = ("tensor 2", "replicate 2 tensor", "tensor 4")
_CONTEXT = ("context 2", "context 3")
FAULTS: dict[str, Fault] = {
    "gradients of split inputs are not summed": Fault(
        f"{_COLLECTIVES}:_AllReduceGradient.backward", _gradient_as_it_is, _TENSOR
    ),
    "partial sums are averaged": Fault(f"{_COLLECTIVES}:all_reduce_tensor", _averages, _TENSOR),
    "partial sums are cut, not summed": Fault(
        f"{_COLLECTIVES}:reduce_scatter_tensor", _own_part_of_own_tensor, ("tensor 2 sequence",)
    ),
    "parts begin one position late": Fault(
        f"{_COLLECTIVES}:_own_slice", _one_position_late, ("tensor 2 sequence", "context 2")
    ),
    "gathered parts are in reverse order": Fault(
        f"{_COLLECTIVES}:concatenate_shards", _reversed_shards, ("tensor 2 sequence", "context 2")
    ),
    "sums over positions stay on their rank": Fault(
        "parallel.context.sequence_view:sum_over_ranks", _returns_first, _CONTEXT
    ),
    "every rank takes the first positions": Fault(
        "parallel.context.sequence_view:local_part", _first_positions, _CONTEXT
    ),
    "causal attention sees later keys": Fault("parallel.context.tiles:causal_tiles", _all_keys, _CONTEXT),
    "the last keys of a ring replace the others": Fault(
        "parallel.context.tiles:Merged.add", _last_tile, ("context 2 ring", "context 3 ring")
    ),
    "cumsum is pointwise": Fault(_SEQUENCE, _pointwise("cumsum"), _CONTEXT),
    "flip and roll are pointwise": Fault(_SEQUENCE, _pointwise("flip", "roll"), _CONTEXT),
    "softmax is pointwise": Fault(_SEQUENCE, _pointwise("softmax", "log_softmax"), _CONTEXT),
    "scans are pointwise between split layers": Fault(
        _SHARD, _pointwise("cumsum", "flip", "roll"), ("tensor 2 sequence",)
    ),
    "an index means the same on every rank": Fault(_SEQUENCE, _written_locally, _CONTEXT),
    "gradients are summed over data ranks": Fault(
        "train.session:Session._run_forward_backward", _gradients_times_ranks, ("replicate", "shard")
    ),
    "ignored targets are counted": Fault("train.loss.loss:Loss.count", _counts_samples, ("replicate", "shard")),
    "the norm is that of one rank": Fault(
        "parallel.clip:global_norm", _norm_of_this_rank, ("shard 2", "pipeline 2", "tensor 2")
    ),
    "BatchNorm takes its own samples": Fault(
        "parallel.replicate.batch_norm:_statistics", _own_statistics, ("replicate 2 synchronized",)
    ),
    "tied gradients are not summed": Fault(
        "parallel.pipeline.tied_gradients:TiedGradients.combine", _does_nothing, ("pipeline 2",)
    ),
    "gradients of branches are not summed": Fault(
        "parallel.branches.branches:BranchExchange._with_summed_gradient", _second_argument, ("branches",)
    ),
    "rows go to other experts": Fault(
        "parallel.expert.exchange:exchange_rows", _rows_rolled, ("replicate 2 expert", "shard 2 expert")
    ),
    "the last chunk is left out": Fault(
        "parallel.chunked_loss.cross_entropy:TokenTargets.chunk_ranges", _without_last_chunk, ("replicate 2 chunks",)
    ),
}
