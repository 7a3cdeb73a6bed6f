"""While a split module runs, each of its split parameters is replaced by a `ShardView`, so that the model's own code
computes with it unmodified.

The module's `forward` is wrapped rather than hooked. So the replacement also holds when a block is recomputed in the
backward pass, and it happens inside of what FSDP2 does before and after a module.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from meshwright.parallel.differentiable_collectives import AxisGroup, average_gradient
from meshwright.parallel.tensor.shard_view import ShardKind, ShardSpec, ShardView, gather_shard_views


@dataclass(frozen=True, eq=False)
class ParameterSwap:
    """The parameter `name` of the module `owner`, which is replaced by a shard view of `full_shape`."""

    owner: nn.Module
    name: str
    spec: ShardSpec
    full_shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SwappedForward:
    """What a wrapped `forward` does: the parameters that it replaces, and what it gathers in its output."""

    swaps: tuple[ParameterSwap, ...]
    gathered_kinds: tuple[ShardKind, ...]


_SWAPPED: WeakKeyDictionary[Callable[..., Any], SwappedForward] = WeakKeyDictionary()


def swapped_forwards(module: nn.Module) -> list[SwappedForward]:
    """What the wrapped `forward` functions of the module and of the modules inside of it do."""
    found = (_SWAPPED.get(child.forward) for child in module.modules() if "forward" in child.__dict__)
    return [swapped for swapped in found if swapped is not None]


def swap_parameters_in_forward(
    module: nn.Module,
    name: str,
    swaps: Sequence[ParameterSwap],
    groups: Sequence[AxisGroup],
    gathered_kinds: tuple[ShardKind, ...],
) -> None:
    """From now on the parameters are replaced while `module.forward` runs. Shard views of `gathered_kinds` in its
    output are gathered."""
    original_forward: Callable[..., Any] = module.forward

    @wraps(original_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler sees other parameters (compiled_blocks.py)
            return original_forward(*args, **kwargs)
        with _swapped(swaps), _running(name, groups):
            output = original_forward(*args, **kwargs)
            return gather_shard_views(output, gathered_kinds) if gathered_kinds else output

    module.forward = forward
    _SWAPPED[forward] = SwappedForward(tuple(swaps), gathered_kinds)


@contextmanager
def _swapped(swaps: Sequence[ParameterSwap]) -> Iterator[None]:
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for swap in swaps:
            parameters: dict[str, Any] = swap.owner._parameters
            parameter = parameters[swap.name]
            if not isinstance(parameter, ShardView):  # an enclosing module may have replaced it already
                group = swap.spec.group
                local = average_gradient(parameter, group) if group.axis == "replicate" else parameter
                parameters[swap.name] = ShardView(local, swap.spec, swap.full_shape)
                replaced.append((parameters, swap.name, parameter))
        yield
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter


@contextmanager
def _running(name: str, groups: Sequence[AxisGroup]) -> Iterator[None]:
    for group in groups:
        group.running_modules.append(name)
    try:
        yield
    finally:
        for group in groups:
            group.running_modules.pop()


def disable_nested_tensors(module: nn.Module) -> None:
    """Keeps torch's encoder from packing padded batches into nested tensors in evaluation, which it does before it
    calls its layers."""
    if isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False


def has_fused_path(module: nn.Module) -> bool:
    """Whether the module may pass its children's weights to a fused kernel in evaluation. It does so only if they are
    plain tensors. To prevent it, split weights are replaced by shard views also while this module itself runs."""
    return isinstance(module, nn.TransformerEncoderLayer)
