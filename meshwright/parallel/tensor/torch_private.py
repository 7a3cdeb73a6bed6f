"""The private interfaces of torch that run code on tensors without `__torch_function__` (outside_dispatch.py). All of
them work on torch 2.11, 2.13 and 2.15."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.torch_private import DisableTorchFunction


def convert_arguments_outside_dispatch(convert: Callable[[Any], Any]) -> Callable[[], None]:
    """Custom autograd functions and function transforms (`torch.func`) are not dispatched to `__torch_function__`. From
    now on, the arguments that one of them is given are first passed to `convert`. Returns a function that ends this.
    Functions of torch itself are left out, except those that call the model's code or its hooks."""
    utils, transforms = torch._functorch.utils, torch._functorch.eager_transforms
    # Functions that transforms call before they begin: collectives cannot run within a transform.
    entries = [
        (torch._functorch.vmap, "_process_batched_inputs"),
        (transforms, "grad_and_value_impl"),
        (transforms, "_vjp_with_argnums"),
        (transforms, "_jvp_with_argnums"),
    ]
    unwrap, originals = utils.unwrap_dead_wrappers, [getattr(module, name) for module, name in entries]

    def convert_and_unwrap(args: tuple[Any, ...]) -> Any:
        # `torch.autograd.Function.apply` passes its arguments through this function, and its `cls` is the function.
        function = sys._getframe(1).f_locals.get("cls")
        return unwrap(args if _is_left_out(function) else convert(args))

    def converted(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(*convert(args), **kwargs)

    def restore() -> None:
        utils.unwrap_dead_wrappers = unwrap
        for (module, name), original in zip(entries, originals, strict=True):
            setattr(module, name, original)

    utils.unwrap_dead_wrappers = convert_and_unwrap
    for (module, name), original in zip(entries, originals, strict=True):
        setattr(module, name, converted(original))
    return restore


def custom_function_of(tensor: Tensor) -> str:
    """The name of the custom autograd function that has returned the tensor itself; empty if none has, or one of torch
    that returns its input."""
    with DisableTorchFunction():
        node = tensor.grad_fn
    if not isinstance(node, torch.autograd.function.BackwardCFunction) or _is_left_out(node._forward_cls):
        return ""
    return str(node._forward_cls.__name__)


def _is_left_out(function: Any) -> bool:
    """Whether an autograd function is one of torch itself: those do not compute with what they are given. Reentrant
    checkpoints and the hooks of modules on gradients do."""
    is_torch = str(getattr(function, "__module__", "")).startswith("torch.")
    return is_torch and function.__name__ not in ("CheckpointFunction", "BackwardHookFunction")


def is_transformed() -> bool:
    """Whether a function transform such as `vmap` runs."""
    return bool(torch._C._are_functorch_transforms_active())
