"""Runs a torch function that is given shard views. `ShardView.__torch_function__` calls `dispatch_function`.

In this order: questions about shape or dtype are answered for the full tensor; matrix products, attention, embeddings
and cross-entropy have rules of their own (products.py, vocabulary.py); functions that torch implements in Python are
entered, so that the functions they call come here; every other function runs on the local tensors, as local_calls.py
derives. Where none of this applies, shards of the sequence or of the vocabulary are gathered, and shards of features
are an error that tells the user which module to leave whole.
"""

import threading
import types
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from meshwright.errors import InputError
from meshwright.parallel.differentiable_collectives import average_gradient, slice_own_shard
from meshwright.parallel.tensor.local_calls import LocalCall, derive_local_call, run_local_call
from meshwright.parallel.tensor.memory.shared_memory import (
    call_on_gathered,
    join_memory,
    note_result,
    note_writes,
    refresh,
    shard_views,
    shares_memory,
    version,
)
from meshwright.parallel.tensor.outside_dispatch import (
    AUTOGRAD_ENTRIES,
    call_autograd_function,
    refuse_hidden_results,
    refuse_unknown,
)
from meshwright.parallel.tensor.products import PRODUCTS, enter_sharded_work
from meshwright.parallel.tensor.randomness import call_with_rank_seed
from meshwright.parallel.tensor.shard_view import ShardSpec, ShardView, is_shard_view
from meshwright.parallel.tensor.vocabulary import VOCABULARY
from meshwright.parallel.torch_private import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    tree_flatten,
    tree_map,
    tree_unflatten,
)
from meshwright.profile.structure.split_rules import CannotSplit
from meshwright.user.code import running_line

# Methods that take the shape of another tensor, with those that are given the shape itself.
_TAKES_SHAPE: dict[str, Callable[..., Tensor]] = {
    "view_as": Tensor.view,
    "reshape_as": Tensor.reshape,
    "expand_as": Tensor.expand,
}
# Names of tensor attributes and methods. Those of the first group do not touch elements and describe the full tensor;
# those of the second concern autograd, which runs on the local tensor.
_NAMES = {
    "metadata": "shape size dim ndim ndimension dtype device layout requires_grad is_leaf numel nelement element_size "
    "itemsize nbytes is_floating_point is_complex is_signed is_nested is_sparse is_sparse_csr is_quantized is_mkldnn "
    "is_cuda is_cpu is_meta is_mps is_xpu is_inference get_device stride is_contiguous names has_names __len__ "
    "__hash__ __repr__ __format__ __dir__ _version _base output_nr",
    "autograd": "register_hook retain_grad grad_fn register_post_accumulate_grad_hook requires_grad_ requires_grad "
    "is_leaf grad",
}
METADATA, _AUTOGRAD = (frozenset(names.split()) for names in _NAMES.values())
_RULES: dict[Any, Callable[..., Any]] = {**PRODUCTS, **VOCABULARY}
_ENTERED = threading.local()  # `functions`: those whose implementations run now in this thread
Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # of a function with its arguments


def dispatch_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return dispatch_by_rules(func, args, kwargs, _call_rule, _call_on_local_tensors)


def dispatch_by_rules(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call_rule: Call, call_on_local_tensors: Call
) -> Any:
    """Runs a function that is given shard views. `call_rule` returns NotImplemented if the function has no rule of its
    own; `call_on_local_tensors` runs every other function that torch does not implement in Python."""
    if isinstance(func, types.FunctionType):
        # Training may have replaced a loss by one that counts its targets, and torch's own one has come here under the
        # name of the other.
        func = getattr(func, "__wrapped__", func)
    name = function_name(func)
    if name in _AUTOGRAD and func not in AUTOGRAD_ENTRIES:
        return call_autograd_function(func, name, args, kwargs)
    if name in METADATA:
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    _prepare_views(func, name, args, kwargs)
    if name.startswith("new_"):  # `new_zeros` and the like take only the dtype and the device of the tensor
        return func(*_replace_views(args, _local_tensor), **kwargs)
    if name == "view_as" and args[0] is args[1]:
        # Autograd functions that return their input (FSDP2's hooks do) call this with gradients disabled. A new view of
        # the same local tensor keeps its gradient.
        view = type(args[0])(args[0].local_tensor, args[0].spec, tuple(args[0].shape))
        join_memory(args[0], view)
        return view
    if name in _TAKES_SHAPE and len(args) == 2 and not is_shard_view(args[0]) and not args[1].spec.samples_by_rank:
        return _TAKES_SHAPE[name](args[0], tuple(args[1].shape))  # nothing has to be gathered for a shape
    result = call_rule(func, args, kwargs)
    if result is not NotImplemented:
        return result
    # A function that uses `super()`, or that calls a function which dispatches under the name of the first, would come
    # back here under its own name: it runs on the local tensors instead.
    if not isinstance(func, types.FunctionType) or "__class__" in func.__code__.co_freevars or func in _entered():
        return call_on_local_tensors(func, args, kwargs)
    _entered().append(func)
    try:
        return python_implementation(func)(*args, **kwargs)
    finally:
        _entered().pop()


def _entered() -> list[types.FunctionType]:
    if not hasattr(_ENTERED, "functions"):
        _ENTERED.functions = []
    functions: list[types.FunctionType] = _ENTERED.functions
    return functions


def _call_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rule = _RULES.get(func)
    if rule is None:
        return NotImplemented
    try:
        return rule(*args, **kwargs)
    except CannotSplit as reason:
        return _gather_or_raise(func, args, kwargs, reason)


def _prepare_views(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Called before a function uses shard views: makes them show what was written into their memory, and raises an
    `InputError` if no rule states what the function does."""
    views = shard_views(args, kwargs)
    if views:
        refuse_unknown(func, name, views)
        refuse_hidden_results(views)
        refresh(views)


def function_name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    return func.__self__.__name__ if name == "__get__" else name


@cache
def python_implementation(func: types.FunctionType) -> types.FunctionType:
    """Returns a copy of a torch function that is implemented in Python. The copy does not dispatch itself to
    `__torch_function__`; the torch functions that it calls are dispatched as usual."""
    no_dispatch = {name: _return_false for name in func.__globals__ if name.startswith("has_torch_function")}
    implementation = types.FunctionType(
        func.__code__, {**func.__globals__, **no_dispatch}, func.__name__, func.__defaults__, func.__closure__
    )
    implementation.__kwdefaults__ = func.__kwdefaults__
    return implementation


def _return_false(*_: Any) -> bool:
    return False


# ---- on local tensors


def _call_on_local_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, tree = tree_flatten((args, kwargs), is_leaf=is_shard_view)
    views = [leaf for leaf in leaves if isinstance(leaf, ShardView)]
    kinds = {view.spec.kind for view in views}
    if len(kinds) > 1 and "sequence" in kinds:  # shards of the sequence are gathered where they meet other shards
        return call_on_gathered(func, args, kwargs, _is_sequence)
    if _mixes_samples(leaves, views):
        return _gather_or_raise(func, args, kwargs, CannotSplit("another input has the samples of one rank only"))
    local_call = _cached_local_call(func, leaves, tree, views[0])
    if isinstance(local_call, str):
        return _gather_or_raise(func, args, kwargs, CannotSplit(local_call))
    spec = views[0].spec
    local_leaves = [
        _local_argument(leaf, local_call.sliced_arguments.get(position), spec) for position, leaf in enumerate(leaves)
    ]
    versions = [version(view) for view in views]
    results = _run(local_call, func, local_leaves, tree, spec.group.rank)
    note_writes(views, versions)
    return wrap_results(func, leaves, tree, local_call, local_leaves, results, ShardView)


def _mixes_samples(leaves: list[Any], views: list[ShardView]) -> bool:
    """Whether a function over the replicate axis may combine the samples of one rank with features of all samples, or
    with a part of a parameter. Parameters that are not split are the same on all ranks; what has been computed is not
    known to be, and may have been computed from this rank's samples."""
    if views[0].spec.group.axis != "replicate":
        return False
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, ShardView) and leaf.dim()]
    if all(view.spec.samples_by_rank for view in views):
        return any(tensor.dim() >= views[0].dim() and not isinstance(tensor, Parameter) for tensor in tensors)
    return bool(tensors) or any(view.spec.samples_by_rank for view in views)


def wrap_results(
    func: Any,
    leaves: list[Any],
    tree: Any,
    local_call: LocalCall,
    local_leaves: list[Any],
    results: list[Any],
    make_view: Callable[..., ShardView],
) -> Any:
    """Returns what the function returns: the views that it was given and returns itself, and new views of the other
    local results. `leaves` and `tree` are its arguments, flattened, and `local_leaves` the local ones."""
    outputs: list[ShardView] = []
    for number, result in enumerate(result for result in results if isinstance(result, Tensor)):
        position = local_call.returned_arguments[number]
        if position is not None and result is local_leaves[position]:
            outputs.append(leaves[position])
            continue
        view = make_view(result, local_call.output_specs[number], local_call.output_shapes[number])
        if local_call.may_share_memory[number] or shares_memory(result, local_leaves):
            note_result(func, leaves, tree, number, view)
        outputs.append(view)
    # A function returns tensors only, or nothing at all.
    return tree_unflatten(outputs or [None] * local_call.output_tree.num_leaves, local_call.output_tree)


def _cached_local_call(func: Any, leaves: list[Any], tree: Any, view: ShardView) -> LocalCall | str:
    """Returns how the function runs on local tensors, or a string with the reason why it cannot."""
    key = (func, tree, tuple(_cache_key(leaf) for leaf in leaves))
    local_calls = view.spec.group.local_calls
    local_call: LocalCall | str | None = local_calls.get(key)
    if local_call is None:
        try:
            with DisableTorchFunction():  # nothing of this is recorded (local_graph.py)
                local_call = derive_local_call(func, leaves, tree)
        except CannotSplit as reason:
            local_call = str(reason)
        local_calls[key] = local_call
    return local_call


def _cache_key(leaf: Any) -> Any:
    if isinstance(leaf, ShardView):
        return (tuple(leaf.shape), leaf.dtype, leaf.spec)
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype)
    if isinstance(leaf, slice):
        return ("slice", leaf.start, leaf.stop, leaf.step)
    return (type(leaf), leaf)


def _local_argument(leaf: Any, sliced: ShardSpec | None, spec: ShardSpec) -> Any:
    if isinstance(leaf, ShardView):
        return leaf.local_tensor
    if not isinstance(leaf, Tensor):
        return leaf
    if sliced is not None:
        return slice_own_shard(leaf, sliced.ranges, sliced.group)
    if not leaf.requires_grad:
        return leaf
    replicated = enter_sharded_work(leaf, spec.group)
    return average_gradient(replicated, spec.group) if spec.samples_by_rank else replicated


def _run(local_call: LocalCall, func: Any, leaves: list[Any], tree: Any, rank: int) -> list[Any]:
    def run(*local_leaves: Any) -> list[Any]:
        return run_local_call(local_call, func, list(local_leaves), tree)

    return call_with_rank_seed(run, rank, *leaves) if local_call.draws_random_numbers else run(*leaves)


# ---- on full tensors


def _gather_or_raise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: CannotSplit) -> Any:
    """Where no rule applies, shards of the sequence or of the vocabulary are gathered; shards of features are an
    error."""
    leaves = tree_flatten((args, kwargs), is_leaf=is_shard_view)[0]
    features = next((leaf for leaf in leaves if isinstance(leaf, ShardView) and leaf.spec.kind == "features"), None)
    if features is None:
        return call_on_gathered(func, args, kwargs, is_shard_view)
    group = features.spec.group
    module = next(reversed(group.running_modules), "") or "the model"
    raise InputError(
        f"{module}: {function_name(func)} ({running_line()}) cannot run on features that are split over {group.size}"
        f" ranks of the {group.axis} axis ({reason}): leave them whole with plan.modules.splits: {{{module}: {{kind:"
        " none}}"
    )


def _replace_views(tree: Any, replacement: Callable[[ShardView], Any]) -> Any:
    return tree_map(
        lambda leaf: replacement(leaf) if isinstance(leaf, ShardView) else leaf, tree, is_leaf=is_shard_view
    )


def _local_tensor(view: ShardView) -> Tensor:
    return view.local_tensor


def _is_sequence(view: ShardView) -> bool:
    return view.spec.kind == "sequence"


ShardView.handler = staticmethod(dispatch_function)
