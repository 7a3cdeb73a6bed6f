"""What of a batch goes into the model and what into the loss; the same for training and for predicting it.

A tuple's or list's last item is the target and the others are the model's arguments. A dict's target is
found under the job's `data.target`, or under target(s) or label(s); the other entries are the model's
keyword arguments. Where a dict has no target, the loss is given the whole dict. Anything else goes to the
model as it is, and to the loss as target.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

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


def at_least_fp32(output: Any) -> Any:
    """A model's output with its half-precision tensors widened, whatever structure it has: losses are computed
    in at least fp32."""

    def widen(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
            return value.float()
        return value

    return tree_map(widen, output)
