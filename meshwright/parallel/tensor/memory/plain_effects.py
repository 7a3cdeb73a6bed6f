"""What a torch function does in the unmodified model: of which argument each result shows the memory, and which
arguments it writes. It is run once on tensors without memory that have the layout of the full ones."""

from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.tensor.shard_view import ShardView
from meshwright.parallel.torch_private import (
    DisableTorchFunction,
    disable_dispatch_modes,
    storage_id,
    tree_flatten,
    tree_unflatten,
)

Effects = tuple[tuple[int | None, ...], frozenset[int]]


def storage_of(tensor: Tensor) -> int:
    while isinstance(tensor, ShardView):
        tensor = tensor.local_tensor
    with DisableTorchFunction():
        return storage_id(tensor)


def plain_aliases(func: Any, leaves: list[Any], tree: Any) -> tuple[int | None, ...]:
    """For each result of the function on full tensors, the position of the argument whose memory it shows; None for
    results with memory of their own. Empty if this depends on values, as for functions that copy selected elements."""
    outcome = plain_effects(func, leaves, tree)
    return outcome[0] if outcome else ()


def plain_effects(func: Any, leaves: list[Any], tree: Any) -> Effects | None:
    """Returns the argument of which each result shows memory, and the arguments that are written; None if the function
    needs values. It is run once for each combination of shapes and layouts."""
    known = next(leaf for leaf in leaves if isinstance(leaf, ShardView)).spec.group.local_calls
    key = ("effects", func, tree, tuple(_layout_key(leaf) for leaf in leaves))
    try:
        if key not in known:
            known[key] = _run_without_memory(func, leaves, tree)
    except TypeError:  # an argument that cannot be hashed
        return _run_without_memory(func, leaves, tree)
    effects: Effects | None = known[key]
    return effects


def _layout_key(leaf: Any) -> Any:
    if isinstance(leaf, slice):
        return ("slice", leaf.start, leaf.stop, leaf.step)
    if not isinstance(leaf, Tensor):
        return (type(leaf), leaf)
    local = leaf
    while isinstance(local, ShardView):
        local = local.local_tensor
    return (tuple(leaf.shape), leaf.dtype, tuple(local.shape), local.stride())


def _run_without_memory(func: Any, leaves: list[Any], tree: Any) -> Effects | None:
    """Runs the function on tensors without memory that have the layout of the unmodified model's."""
    try:
        with DisableTorchFunction(), disable_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
            stand_ins = [_stand_in(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(stand_ins, tree)
            outputs = tree_flatten(func(*args, **kwargs))[0]
            storages = {
                storage_of(leaf): position for position, leaf in enumerate(stand_ins) if isinstance(leaf, Tensor)
            }
            aliases = tuple(
                storages.get(storage_of(output)) if isinstance(output, Tensor) else None for output in outputs
            )
            written = (
                position for position, leaf in enumerate(stand_ins) if isinstance(leaf, Tensor) and leaf._version
            )
            return aliases, frozenset(written)
    except Exception:
        return None


def _stand_in(leaf: Tensor) -> Tensor:
    local = leaf
    while isinstance(local, ShardView):
        local = local.local_tensor
    strides = full_strides(tuple(local.shape), local.stride(), tuple(leaf.shape))
    return torch.empty_strided(leaf.shape, strides, dtype=leaf.dtype, device="meta")


def full_strides(
    local_shape: tuple[int, ...], local_strides: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...]:
    """The strides of a tensor of `shape` whose memory is laid out like that of a local part of it: dimensions in the
    same order, and gaps where the part has gaps."""
    if len(local_shape) != len(shape):
        return tuple(torch.empty(shape, device="meta").stride())
    strides = [0] * len(shape)
    packed_local, packed_full = 1, 1
    # From the innermost dimension to the outermost; of dimensions with equal strides, the last one is the innermost.
    for dim in sorted(range(len(shape)), key=lambda dim: (local_strides[dim], -dim)):
        stride = local_strides[dim]
        if stride == 0:
            continue
        gap = max(1, -(-stride // packed_local)) if local_shape[dim] > 1 else 1
        strides[dim] = gap * packed_full
        packed_local, packed_full = max(stride, 1) * local_shape[dim], strides[dim] * shape[dim]
    return tuple(strides)
