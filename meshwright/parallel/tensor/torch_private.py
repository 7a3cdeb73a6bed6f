"""The private interfaces of torch that run code on tensors without `__torch_function__` (outside_dispatch.py). All of
them work on torch 2.11, 2.13 and 2.15."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.torch_private import DisableTorchFunction


def convert_arguments_outside_dispatch(
    convert: Callable[[Any], Any], refuse: Callable[[Any, tuple[Any, ...]], None]
) -> Callable[[], None]:
    """Custom autograd functions and function transforms (`torch.func`) are not dispatched to `__torch_function__`. From
    now on, the arguments that one of them is given are first passed to `convert`. Where that cannot be done, the
    function and its arguments are passed to `refuse`, which raises an error if they had to be converted. Returns a
    function that ends this. Functions of torch itself are left out, except those that call the model's code or its
    hooks."""
    transforms = torch._functorch.eager_transforms
    # Functions that transforms call before they begin: collectives cannot run within a transform.
    entries = [
        (torch._functorch.vmap, "_process_batched_inputs"),
        (transforms, "grad_and_value_impl"),
        (transforms, "_vjp_with_argnums"),
        (transforms, "_jvp_with_argnums"),
    ]
    originals = [getattr(module, name) for module, name in entries]

    def converted(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(*convert(args), **kwargs)

    def restore() -> None:
        restore_functions()
        for (module, name), original in zip(entries, originals, strict=True):
            setattr(module, name, original)

    restore_functions = _convert_arguments_of_functions(convert, refuse)
    for (module, name), original in zip(entries, originals, strict=True):
        setattr(module, name, converted(original))
    return restore


def _convert_arguments_of_functions(
    convert: Callable[[Any], Any], refuse: Callable[[Any, tuple[Any, ...]], None]
) -> Callable[[], None]:
    """Does for custom autograd functions what `convert_arguments_outside_dispatch` says."""
    apply = torch.autograd.Function.__dict__["apply"]
    if isinstance(apply, classmethod):  # before torch 2.15
        return _convert_unwrapped_arguments(convert)
    metaclass = type(torch.autograd.Function)

    def apply_to_converted(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_left_out(cls):
            args, kwargs = convert(args), convert(kwargs)
        return apply.__get__(None, cls)(*args, **kwargs)

    def attribute(cls: Any, name: str) -> Any:
        """An `apply` that the model's code has kept from before is C code, which only looks up `forward` in Python."""
        value = type.__getattribute__(cls, name)
        if name != "forward" or _is_left_out(cls):
            return value

        @wraps(value)
        def forward(*args: Any, **kwargs: Any) -> Any:
            refuse(cls, args)
            return value(*args, **kwargs)

        return forward

    def restore() -> None:
        type.__setattr__(torch.autograd.Function, "apply", apply)
        type.__delattr__(metaclass, "__getattribute__")

    type.__setattr__(torch.autograd.Function, "apply", classmethod(apply_to_converted))
    type.__setattr__(metaclass, "__getattribute__", attribute)
    return restore


def _convert_unwrapped_arguments(convert: Callable[[Any], Any]) -> Callable[[], None]:
    """The same before torch 2.15, where `torch.autograd.Function.apply` is Python code which passes its arguments
    through a function of torch."""
    utils = torch._functorch.utils
    unwrap = utils.unwrap_dead_wrappers

    def convert_and_unwrap(args: tuple[Any, ...]) -> Any:
        function = sys._getframe(1).f_locals.get("cls")  # of `apply`
        return unwrap(args if _is_left_out(function) else convert(args))

    def restore() -> None:
        utils.unwrap_dead_wrappers = unwrap

    utils.unwrap_dead_wrappers = convert_and_unwrap
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
