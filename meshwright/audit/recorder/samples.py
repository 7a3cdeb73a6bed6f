"""Digests of what a model is called with, which show whether two trainings saw the same samples, in any order and
division over ranks and micro-batches."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .layouts import local


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors inside arguments, with their place."""
    if isinstance(value, Tensor):
        found = local(value)
        if found is not None:
            yield path or "0", found
    elif isinstance(value, Mapping):
        for key in value:
            yield from tensors_of(value[key], f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_of(item, f"{path}.{index}" if path else str(index))


def digest_rows(tensor: Tensor) -> list[str]:
    """A digest of each row along the first dimension. Floating-point values count as they are in bf16, so that a cast
    before the call changes nothing."""
    numbers = _as_integers(tensor)
    if not numbers.numel():
        return []
    rows = numbers.reshape(numbers.shape[0], -1) if numbers.dim() else numbers.reshape(1, 1)
    return [hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in rows]


def digest_elements(tensor: Tensor) -> str:
    """The sum of the digests of all elements, which does not depend on how they are divided."""
    mixed = _as_integers(tensor).reshape(-1).to(torch.int64) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    mixed = mixed ^ (mixed >> 32)
    return str(int(mixed.sum()) % 2**64)


def _as_integers(tensor: Tensor) -> Tensor:
    value = tensor.detach().to("cpu")
    if value.is_complex():
        value = torch.view_as_real(value)
    if value.dtype.is_floating_point:
        return value.to(torch.bfloat16).contiguous().view(torch.int16)
    return value.to(torch.int64).contiguous()
