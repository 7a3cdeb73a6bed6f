"""What of a batch goes into the model and what into the loss.

A tuple's or list's last item is the target and the others are the model's arguments. A dict's target is
found under the job's `data.target`, or under target(s) or label(s); the other entries are the model's
keyword arguments. Where a dict has no target, the loss is given the whole dict. Anything else goes to the
model as it is, and to the loss as target.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.errors import InputError, did_you_mean

TARGET_KEYS = ("target", "targets", "label", "labels")


@dataclass(frozen=True)
class Example:
    """One microbatch, ready for a model."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    target: Any


def split(data: Any, target_key: str | None = None) -> Example:
    if isinstance(data, Mapping):
        return _split_mapping(data, target_key)
    if isinstance(data, tuple | list) and len(data) > 1:
        return Example(tuple(data[:-1]), {}, data[-1])
    if isinstance(data, tuple | list):
        data = data[0]
    return Example((data,), {}, data)


def _split_mapping(data: Mapping[str, Any], target_key: str | None) -> Example:
    if target_key is not None and target_key not in data:
        raise InputError(f"data.target is '{target_key}', but batches have no such key{did_you_mean(target_key, data)}")
    key = target_key or next((key for key in TARGET_KEYS if key in data), None)
    if key is None:
        return Example((), dict(data), data)
    return Example((), {name: value for name, value in data.items() if name != key}, data[key])


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
