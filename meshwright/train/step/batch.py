"""Batches on their way to a device: moved, counted, and cut into microbatches."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.errors import InputError


def move(data: Any, device: torch.device, *, channels_last: bool = False) -> Any:
    """The batch on the device; images in the layout that the plan asks for. Copies from pinned memory go on while
    the program does."""
    if device.type == "cpu" and not channels_last:
        return data

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if channels_last and value.dim() == 4:
            return value.to(device, non_blocking=True, memory_format=torch.channels_last)
        return value.to(device, non_blocking=True)

    return tree_map(place, data)


def samples_in(data: Any) -> int:
    """The batch size, read off the first tensor; for batches of a foreign loader."""
    for leaf in tree_leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    raise InputError("the batch holds no tensor: its size cannot be told")


def chunks(data: Any, parts: int) -> list[Any]:
    """A batch cut into microbatches along its first dimension; for batches of a foreign loader."""
    if parts == 1:
        return [data]
    size = samples_in(data)
    bounds = [(size * part // parts, size * (part + 1) // parts) for part in range(parts)]

    def cut(begin: int, end: int) -> Any:
        def narrow(value: Any) -> Any:
            whole = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == size
            return value[begin:end] if whole else value

        return tree_map(narrow, data)

    return [cut(begin, end) for begin, end in bounds if end > begin]
