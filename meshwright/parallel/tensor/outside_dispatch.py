"""What is given shard views without being dispatched to `__torch_function__`: custom autograd functions, function
transforms such as `vmap`, hooks on tensors, and gradients that the model's own code computes.

No rule states what such code does along a divided dimension, in its forward or in its backward pass. Custom functions,
transforms and hooks are therefore given full tensors, on every rank the same. What cannot be done so is refused, with
the line of the model's code.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.parallel.differentiable_collectives import all_gather_tensor, slice_of_rank
from meshwright.parallel.tensor.memory.shared_memory import refresh, watch_copy
from meshwright.parallel.tensor.shard_view import ShardView, is_shard_view
from meshwright.parallel.tensor.torch_private import (
    convert_arguments_outside_dispatch,
    custom_function_of,
    is_transformed,
)
from meshwright.parallel.torch_private import tree_map
from meshwright.user.code import running_line

AUTOGRAD_ENTRIES = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


class _Conversion:
    """Gathers shard views for custom functions as long as a model of this process has divided tensors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models = 0
        self._restore: Callable[[], None] | None = None

    def begin(self) -> None:
        with self._lock:
            self._models += 1
            if self._restore is None:
                self._restore = convert_arguments_outside_dispatch(_gathered, _refuse_views)

    def end(self) -> None:
        with self._lock:
            self._models -= 1
            if self._models == 0 and self._restore is not None:
                self._restore()
                self._restore = None


_CONVERSION = _Conversion()


def gather_for_custom_functions(model: nn.Module) -> None:
    """Until the model is freed, custom autograd functions and function transforms get full tensors in the place of
    shard views."""
    _CONVERSION.begin()
    finalize(model, _CONVERSION.end)


def _gathered(arguments: Any) -> Any:
    """The arguments with full tensors in the place of shard views."""
    return tree_map(_full_copy, arguments, is_leaf=is_shard_view)


def _full_copy(leaf: Any) -> Any:
    while isinstance(leaf, ShardView):
        refuse_hidden_results([leaf])
        refresh([leaf])
        full = leaf.gathered()
        watch_copy(leaf, full)
        leaf = full
    return leaf


def _refuse_views(function: Any, arguments: tuple[Any, ...]) -> None:
    """Raises an `InputError` if a custom function runs on a shard view, whose gradient would be lost."""
    for argument in arguments:
        if isinstance(argument, ShardView):
            group, name = argument.spec.group, function.__name__
            raise InputError(
                f"{running_line()} calls an apply of {name} that was kept before the model was divided, with a"
                f" tensor that is divided over the {group.size} ranks of the {group.axis} axis: write {name}.apply(...)"
                f" where it is called, or set plan.axes.{group.axis} to 1"
            )


def refuse_hidden_results(views: Iterable[ShardView]) -> None:
    """Raises an `InputError` for a view that a custom function has returned as its own result: autograd knows the
    backward pass of the view, but not of the local tensor that the next function would use."""
    for view in views:
        if name := custom_function_of(view):
            remedy = "pass use_reentrant=False" if name == "CheckpointFunction" else "return ordinary tensors from it"
            raise InputError(
                f"{running_line()} uses the result of {name}, a custom autograd function whose result is divided over"
                f" the {view.spec.group.size} ranks of the {view.spec.group.axis} axis: {remedy}, or set"
                f" plan.axes.{view.spec.group.axis} to 1"
            )


def refuse_unknown(func: Any, name: str, views: list[ShardView]) -> None:
    """Raises an `InputError` for functions that would read or replace the autograd state of divided tensors."""
    group = views[0].spec.group
    if name == "__set__":
        raise InputError(
            f"{running_line()} sets an attribute of a tensor that is divided over the {group.size} ranks of the"
            f" {group.axis} axis: make a new tensor instead, or set plan.axes.{group.axis} to 1"
        )
    if is_transformed():
        raise InputError(
            f"{running_line()} uses a tensor that is divided over the {group.size} ranks of the {group.axis} axis in a"
            " function that torch.func transforms: pass it to the transformed function as an argument, or set"
            f" plan.axes.{group.axis} to 1"
        )
    if func in AUTOGRAD_ENTRIES:
        raise InputError(
            f"{running_line()} computes gradients of a tensor that is divided over the {group.size} ranks of the"
            f" {group.axis} axis, in the forward pass: set plan.axes.{group.axis} to 1"
        )


def call_autograd_function(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function or reads an attribute that concerns autograd, which runs on the local tensor. A hook gets the
    gradient of the full tensor."""
    view = args[0]
    if name == "register_hook":
        hook = args[1] if len(args) > 1 else kwargs["hook"]
        if getattr(hook, "ignores_gradient", False):  # nothing has to be gathered for it (parallel/shard.py)
            return view.local_tensor.register_hook(hook)
        return view.local_tensor.register_hook(_hook_on_full_gradient(hook, view))
    result = func(view.local_tensor, *args[1:], **kwargs)
    if name == "grad" and result is not None:
        group = view.spec.group
        raise InputError(
            f"{running_line()} uses the gradient of a tensor that is divided over the {group.size} ranks of the"
            f" {group.axis} axis, in the forward pass: set plan.axes.{group.axis} to 1"
        )
    return view if name == "requires_grad_" else result


def _hook_on_full_gradient(hook: Callable[[Tensor], Tensor | None], view: ShardView) -> Callable[[Tensor], Any]:
    spec = view.spec
    if spec.samples_by_rank:
        raise InputError(
            f"{running_line()} registers a hook on the gradient of a tensor that is split over the replicate axis:"
            " leave the module whole with plan.modules.splits, or remove the hook"
        )
    # The gradients that ranks of the context axis compute are averaged over these ranks at the end of the step.
    factor = spec.group.size if spec.kind == "context" else 1

    def call(gradient: Tensor) -> Tensor | None:
        full = all_gather_tensor(gradient.detach(), spec.ranges, spec.group) / factor
        changed = hook(full)
        if changed is None:
            return None
        return slice_of_rank(changed, spec.ranges, spec.group.rank) * factor

    return call
