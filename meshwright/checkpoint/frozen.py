"""Leaves frozen weights out of a checkpoint. In place of them it has their shapes, dtypes and digests, by which a load
finds out whether the model that was built again has the same frozen weights.

The digest of a tensor does not depend on how a plan divides it. Modulo 2^64 it is

    digest = sum over elements of mix(bits of the element xor position in the whole tensor * 0x9E3779B97F4A7C15)

(`region_digest`), so each rank sums over the regions that it holds, and the sums of all regions are added.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint.chunks import Box, ChunkedTensor, chunks_of, local_value
from meshwright.dtypes import torch_name
from meshwright.errors import CheckpointError
from meshwright.messages.exchange import all_gather_values
from meshwright.parallel.weights.layout import local_tensor

FROZEN = "frozen"  # the key of the object that describes the weights that were left out
Description = list[Any]  # dtype, shape and digest of a weight

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
_ELEMENTS_AT_ONCE = 2**20  # for which the digest allocates memory
# 0x9E3779B97F4A7C15 and the two factors of `_mix` (those of SplitMix64) as signed numbers.
_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685


def without_frozen(state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Returns the state without the parameters of the module that are frozen, and with their descriptions. All ranks
    call this together."""
    keys = {f"model/{name}" for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    left_out = {key: value for key, value in state.items() if key in keys and _has_digest(value)}
    kept = {key: value for key, value in state.items() if key not in left_out}
    return {**kept, FROZEN: _describe({key.removeprefix("model/"): value for key, value in left_out.items()})}


def check_frozen(state: Mapping[str, Any], saved: Mapping[str, Description] | None) -> None:
    """Raises a `CheckpointError` if a weight that was left out of a checkpoint has another value in the model with this
    state. `saved` are the descriptions in the checkpoint, or None if nothing was left out. All ranks call this
    together."""
    if not saved:
        return
    local = {name: state[f"model/{name}"] for name in saved if f"model/{name}" in state}
    for name, description in _describe({name: value for name, value in local.items() if _has_digest(value)}).items():
        if description != saved[name]:
            raise CheckpointError(
                f"the checkpoint was saved without frozen weights, and {name} of the model has other values than when"
                " it was saved: build the model with the same base weights"
            )


def is_description(description: Any) -> bool:
    """Whether a value read from a checkpoint is the description of a weight."""
    if not (isinstance(description, list) and len(description) == 3):
        return False
    dtype, shape, digest = description
    is_shape = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    return isinstance(dtype, str) and is_shape and isinstance(digest, str)


def region_digest(values: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> int:
    """Returns the digest of a region that begins at `offsets` of a tensor of this shape."""
    if values.dim() == 0:
        values, offsets, shape = values.reshape(1), (0,), (1,)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    total = 0
    for first_row, rows in _row_blocks(values):
        position = torch.zeros([1] * rows.dim(), dtype=torch.int64, device=rows.device)
        for dim, size in enumerate(rows.shape):
            begin = offsets[dim] + (first_row if dim == 0 else 0)
            along = torch.arange(begin, begin + size, device=rows.device) * strides[dim]
            position = position + along.view([size if other == dim else 1 for other in range(rows.dim())])
        bits = rows.detach().view(_INTEGERS[rows.element_size()]).to(torch.int64)
        total += int(_mix(bits ^ (position * _STEP)).sum())
    return total % 2**64


def _row_blocks(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields blocks of rows of a tensor, each with the index of its first row."""
    rows = max(1, _ELEMENTS_AT_ONCE // max(1, math.prod(values.shape[1:])))
    for first_row in range(0, len(values), rows):
        yield first_row, values[first_row : first_row + rows]


def _mix(x: Tensor) -> Tensor:
    """Maps each 64-bit number to another one, so that every bit depends on every bit. Products wrap around."""
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


def _has_digest(value: Any) -> bool:
    """Whether a digest can be computed of a value: not of quantized weights, which are no plain tensors."""
    if not isinstance(value, ChunkedTensor | Tensor):
        return False
    tensor = local_tensor(local_value(value))
    return type(tensor) in (Tensor, nn.Parameter) and tensor.element_size() in _INTEGERS


def _describe(weights: Mapping[str, Any]) -> dict[str, Description]:
    """Returns the description of each weight by name, of those of all ranks. Raises a `CheckpointError` on all ranks if
    ranks that hold the same region have different values in it."""
    local = {
        name: [
            torch_name(local_value(value).dtype),
            list(value.shape),
            [[*map(list, box), region_digest(part, box[0], value.shape)] for box, part in chunks_of(value).items()],
        ]
        for name, value in weights.items()
    }
    kinds: dict[str, tuple[str, list[int]]] = {}
    regions: dict[str, dict[Box, int]] = {}
    for of_rank in all_gather_values(local):
        for name, (dtype, shape, digests) in of_rank.items():
            kinds[name] = dtype, shape
            for offsets, sizes, digest in digests:
                box = tuple(offsets), tuple(sizes)
                if regions.setdefault(name, {}).setdefault(box, digest) != digest:
                    raise CheckpointError(
                        f"the frozen weight {name} is not the same on all ranks: each rank builds the model, and its"
                        " code probably draws random numbers without a seed"
                    )
    return {
        name: [*kind, f"{sum(regions.get(name, {}).values()) % 2**64:016x}"] for name, kind in sorted(kinds.items())
    }
