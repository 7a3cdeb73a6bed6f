"""Runs a torch function that is given sequence views. `SequenceView.__torch_function__` calls `dispatch_function`.

In this order: questions about shape or dtype are answered for the full tensor; lookups, linear layers, attention, cross
entropies and slices have rules of their own (rules.py); functions that torch implements in Python are entered, so that
the functions they call come here; every other function runs on the local tensors, as `tensor/local_calls.py` derives it
from the rules of `profile/structure/split_rules.py`.

Where two divided tensors do not fit together, as queries and keys in a product, all but one are gathered. Where nothing
of this applies, all are, and every rank computes the same: right for any function, but undivided.
"""

from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.context.rules import RULES
from meshwright.parallel.context.sequence_view import (
    SequenceSpec,
    SequenceView,
    gather,
    is_sequence_view,
    local_part,
)
from meshwright.parallel.tensor.dispatch import dispatch_by_rules, wrap_results
from meshwright.parallel.tensor.local_calls import LocalCall, derive_local_call, run_local_call
from meshwright.parallel.tensor.memory.shared_memory import call_on_gathered, note_writes, version
from meshwright.parallel.tensor.randomness import call_with_rank_seed
from meshwright.parallel.tensor.shard_view import ShardView
from meshwright.parallel.torch_private import (
    DisableTorchFunction,
    tree_flatten,
)
from meshwright.profile.structure.split_rules import CannotSplit


def dispatch_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return dispatch_by_rules(func, args, kwargs, _call_rule, _call_on_local_tensors)


def _call_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rule = RULES.get(func)
    return NotImplemented if rule is None else rule(*args, **kwargs)


# ---- on local tensors


def _call_on_local_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, tree = tree_flatten((args, kwargs), is_leaf=_is_view)
    views = [leaf for leaf in leaves if isinstance(leaf, SequenceView)]
    for kept in _choices_of_views(views):
        local_call = _cached_local_call(func, leaves, kept, tree)
        if local_call is not None:
            return _run(local_call, func, leaves, kept, tree)
    return call_on_gathered(func, args, kwargs, is_sequence_view)


def _choices_of_views(views: list[SequenceView]) -> list[list[SequenceView]]:
    """Which views stay divided, in the order in which this is tried; the others are gathered."""
    distinct = list({id(view): view for view in views}.values())
    alone = [[view] for view in distinct] if len(distinct) > 1 else []
    fit_together = len({view.spec.tokens for view in distinct}) == 1
    return ([distinct] if fit_together else []) + alone


def _cached_local_call(func: Any, leaves: list[Any], kept: list[SequenceView], tree: Any) -> LocalCall | None:
    """Returns how the function runs on the local tensors of the kept views, with full tensors in the place of others;
    None if it cannot."""
    spec = kept[0].spec
    kept_ids = {id(view) for view in kept}
    key = (func, tree, tuple(_cache_key(leaf, id(leaf) in kept_ids) for leaf in leaves))
    local_calls = spec.group.local_calls
    if key not in local_calls:
        # Tensors that are not divided by position, of whatever class, are replaced by empty ones of the same shape.
        shapes = [
            leaf
            if id(leaf) in kept_ids or not isinstance(leaf, Tensor)
            else torch.empty((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
            for leaf in leaves
        ]
        try:
            with DisableTorchFunction():
                local_calls[key] = derive_local_call(func, shapes, tree)
        except CannotSplit:
            local_calls[key] = None
    call: LocalCall | None = local_calls[key]
    return call


def _cache_key(leaf: Any, is_kept: bool) -> Any:
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.spec if is_kept else None)  # type: ignore[attr-defined]
    if isinstance(leaf, slice):
        return ("slice", leaf.start, leaf.stop, leaf.step)
    return (type(leaf), leaf)


def _run(local_call: LocalCall, func: Any, leaves: list[Any], kept: list[SequenceView], tree: Any) -> Any:
    kept_ids = {id(view) for view in kept}
    local_leaves = []
    for position, leaf in enumerate(leaves):
        sliced = local_call.sliced_arguments.get(position)
        local = leaf
        if isinstance(leaf, SequenceView):
            local = leaf.local_tensor if id(leaf) in kept_ids else gather(leaf)
        if sliced is not None:
            assert isinstance(sliced, SequenceSpec)
            local = local_part(local, sliced)
        local_leaves.append(local)

    def run(*arguments: Any) -> list[Any]:
        return run_local_call(local_call, func, list(arguments), tree)

    draws = local_call.draws_random_numbers
    versions = [version(view) for view in kept]
    rank = kept[0].spec.group.rank
    results = call_with_rank_seed(run, rank, *local_leaves) if draws else run(*local_leaves)
    note_writes(kept, versions)
    return wrap_results(func, leaves, tree, local_call, local_leaves, results, SequenceView)


def _is_view(tree: Any) -> bool:
    return isinstance(tree, ShardView)


SequenceView.handler = staticmethod(dispatch_function)
