"""A function of torch that is given parts: answered, run by a rule of its own, taken apart, or run on local tensors."""

import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from meshwright.errors import InputError
from meshwright.parallel.exchange import averaged, scatter
from meshwright.parallel.tensor.products import PRODUCTS, entered
from meshwright.parallel.tensor.randomness import own_chance
from meshwright.parallel.tensor.rules import Decision, decide, run
from meshwright.parallel.tensor.shard_view import ShardSpec, ShardView, is_part, whole
from meshwright.parallel.tensor.vocabulary import VOCABULARY
from meshwright.profile.structure.split_rules import Refused

# What is asked of a tensor without touching its elements: the whole one answers.
_WORDS = {
    "asked": "shape size dim ndim ndimension dtype device layout requires_grad is_leaf numel nelement element_size "
    "itemsize nbytes is_floating_point is_complex is_signed is_nested is_sparse is_sparse_csr is_quantized is_mkldnn "
    "is_cuda is_cpu is_meta is_mps is_xpu is_inference get_device stride is_contiguous names has_names grad __len__ "
    "__hash__ __repr__ __format__ __dir__ _version output_nr",
    "of_local": "register_hook retain_grad grad_fn register_post_accumulate_grad_hook requires_grad_",
}
_QUESTIONS, _OF_LOCAL = (frozenset(words.split()) for words in _WORDS.values())
_RULES: dict[Any, Callable[..., Any]] = {**PRODUCTS, **VOCABULARY}


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = _name(func)
    if name in _QUESTIONS:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name in _OF_LOCAL:
        return func(args[0].local, *args[1:], **kwargs)
    if name.startswith("new_"):  # it asks for a type and a device
        return func(
            *tree_map(lambda leaf: leaf.local if isinstance(leaf, ShardView) else leaf, args, is_leaf=is_part), **kwargs
        )
    if name == "view_as" and args[0] is args[1]:
        # An autograd function that hands its input on (FSDP's hooks do) asks so, without gradients: they must go on.
        return ShardView(args[0].local, args[0].mark, tuple(args[0].shape))
    rule = _RULES.get(func)
    if rule is not None:
        try:
            found = rule(*args, **kwargs)
        except Refused as refused:
            return _otherwise(func, args, kwargs, refused)
        if found is not NotImplemented:
            return found
    # One that calls its own name in `Tensor`'s base class comes back here under its own name: it is run as it is.
    if isinstance(func, types.FunctionType) and "__class__" not in func.__code__.co_freevars:
        return _body(func)(*args, **kwargs)
    return _general(func, args, kwargs)


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    return func.__self__.__name__ if name == "__get__" else name


@cache
def _body(func: types.FunctionType) -> types.FunctionType:
    """A function that torch has in Python, going on where it would hand itself over to us: what it calls does."""
    handed_over = {name: _never for name in func.__globals__ if name.startswith("has_torch_function")}
    made = types.FunctionType(
        func.__code__, {**func.__globals__, **handed_over}, func.__name__, func.__defaults__, func.__closure__
    )
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def _never(*_: Any) -> bool:
    return False


def _general(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec = tree_flatten((args, kwargs), is_leaf=is_part)
    parts = [leaf for leaf in leaves if isinstance(leaf, ShardView)]
    kinds = {part.mark.kind for part in parts}
    if len(kinds) > 1 and "sequence" in kinds:  # they become whole where they meet parts of features
        return func(*_with(args, _sequence_whole), **_with(kwargs, _sequence_whole))
    key = (func, spec, tuple(_frozen(leaf) for leaf in leaves))
    decisions = parts[0].mark.team.decisions
    decision = decisions.get(key)
    if decision is None:
        try:
            decision = decide(func, leaves, spec)
        except Refused as refused:
            decision = str(refused)
        decisions[key] = decision
    if isinstance(decision, str):
        return _otherwise(func, args, kwargs, Refused(decision))
    mark = parts[0].mark
    local = [_local(leaf, decision.scattered.get(place), mark) for place, leaf in enumerate(leaves)]
    with _chance(decision.random, mark, parts[0].device):
        results = run(decision, func, local, spec)
    made = []
    for place, result in enumerate(result for result in results if isinstance(result, Tensor)):
        at = decision.same[place]
        if at is not None and result is local[at]:
            made.append(leaves[at])
        else:
            made.append(ShardView(result, decision.marks[place], decision.shapes[place]))
    rest = iter(made)
    filled = [next(rest) if slot is not None else None for slot in _slots(decision)]
    return tree_unflatten(filled, decision.spec)


def _slots(decision: Decision) -> list[int | None]:
    """Which of the outputs are tensors: all, or none where a function returns nothing."""
    return [0] * len(decision.marks) if decision.marks else [None] * decision.spec.num_leaves


def _local(leaf: Any, scattered: ShardSpec | None, mark: ShardSpec) -> Any:
    if isinstance(leaf, ShardView):
        return leaf.local
    if not isinstance(leaf, Tensor):
        return leaf
    if scattered is not None:
        return scatter(leaf, scattered.division, scattered.team)
    if not leaf.requires_grad:
        return leaf
    found = entered(leaf, mark.team)
    return averaged(found, mark.team) if mark.samples else found


def _otherwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], refused: Refused) -> Any:
    """Where there is no rule: parts along the sequence or the vocabulary are made whole, others are an error."""
    parts = [leaf for leaf in tree_flatten((args, kwargs), is_leaf=is_part)[0] if isinstance(leaf, ShardView)]
    bad = next((part for part in parts if part.mark.kind == "features"), None)
    if bad is None:
        return func(*_with(args, _whole), **_with(kwargs, _whole))
    module = next(reversed(bad.mark.team.running), "") or "the model"
    axis = bad.mark.team.axis
    raise InputError(
        f"{module}: {_name(func)} cannot run on features that {bad.mark.team.ranks} ranks of the {axis} axis hold parts"
        f" of ({refused}): leave them whole with plan.modules.splits: {{{module}: {{kind: none}}}}"
    )


def _with(tree: Any, change: Callable[[ShardView], Any]) -> Any:
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, ShardView) else leaf, tree, is_leaf=is_part)


def _whole(part: ShardView) -> Tensor:
    return whole(part)


def _sequence_whole(part: ShardView) -> Tensor:
    return whole(part) if part.mark.kind == "sequence" else part


def _chance(random: bool, mark: ShardSpec, device: torch.device) -> AbstractContextManager[None]:
    return own_chance(mark.team.rank, device) if random else nullcontext()


def _frozen(leaf: Any) -> Any:
    if isinstance(leaf, ShardView):
        return (tuple(leaf.shape), leaf.dtype, leaf.mark)
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype)
    if isinstance(leaf, slice):
        return ("slice", leaf.start, leaf.stop, leaf.step)
    return (type(leaf), leaf)


ShardView.handler = staticmethod(call)
