"""Weights as integers with one scale a row, in plain torch operations.

A row is a slice along the first dimension: an embedding's vector, a convolution's output channel. Its largest value
becomes the largest integer, so that no value is off by more than half a scale:

    rows = round(weight / scale),  scale = max |row| / (2^(bits - 1) - 1)        `quantized`
    weight ≈ rows · scale                                                        `restored`
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize


@dataclass(frozen=True)
class Held:
    """A parameter, and who holds it under which name: of a tied one there are several."""

    weight: nn.Parameter
    holders: tuple[tuple[nn.Module, str], ...]


def quantized(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(rows, scale); the scale is in fp32 and has the weight's number of dimensions."""
    largest = torch.iinfo(dtype).max
    wide = weight.detach().float()
    scale = wide.abs().amax(dim=tuple(range(1, wide.dim())), keepdim=True) / largest
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)  # a row of zeros
    return (wide / scale).round().clamp(-largest, largest).to(dtype), scale


def restored(rows: Tensor, scale: Tensor) -> Tensor:
    return rows.float() * scale


def held(model: nn.Module) -> list[Held]:
    """All parameters of a model, each once."""
    found: dict[int, Held] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            before = found[id(weight)].holders if id(weight) in found else ()
            found[id(weight)] = Held(weight, (*before, (module, name)))
    return list(found.values())


def keep_as_rows(model: nn.Module, chosen: Iterable[Held], dtype: torch.dtype) -> None:
    """Replaces parameters of the model by their rows; the holders of a tied one share them."""
    for each in chosen:
        rows, scale = quantized(each.weight, dtype)
        for module, name in each.holders:
            if type(module) is nn.Embedding and module.max_norm is None and module is not model:
                _replace(model, module, RowEmbedding(module, rows, scale))
            else:
                kept = _Restored(rows, scale, each.weight.dtype)
                parametrize.register_parametrization(module, name, kept, unsafe=True)


class RowEmbedding(nn.Module):
    """Restores the rows that are looked up, never the whole table."""

    rows: Tensor
    scale: Tensor

    def __init__(self, replaced: nn.Embedding, rows: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows)
        self.register_buffer("scale", scale)
        self._dtype = replaced.weight.dtype

    @property
    def weight(self) -> Tensor:
        """For models that multiply by an embedding's weight themselves."""
        return restored(self.rows, self.scale).to(self._dtype)

    def forward(self, indices: Tensor) -> Tensor:
        found = restored(F.embedding(indices, self.rows), F.embedding(indices, self.scale))
        return found.to(self._dtype)


class _Restored(nn.Module):
    """A parametrization: whoever reads the parameter gets what its rows stand for."""

    rows: Tensor
    scale: Tensor

    def __init__(self, rows: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("rows", rows)
        self.register_buffer("scale", scale)
        self._dtype = dtype

    def forward(self, nothing: Tensor) -> Tensor:
        return restored(self.rows, self.scale).to(self._dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.new_empty(0)  # the rows are all that is kept


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)
