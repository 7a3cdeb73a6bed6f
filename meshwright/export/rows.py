"""Stores weights as integers with one scale per row, in plain torch operations.

A row is a slice along the first dimension: the vector of one embedding, or one output channel of a convolution. Its
largest absolute value becomes the largest integer, so the error of every value is at most half the scale:

    rows = round(weight / scale),  scale = max |row| / (2^(bits - 1) - 1)        `quantize_rows`
    weight ≈ rows · scale                                                        `dequantize_rows`
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize


@dataclass(frozen=True)
class ParameterUses:
    """A parameter and its uses. `holders` are pairs of a module that holds the parameter and the parameter's name in
    this module; a tied parameter has several."""

    weight: nn.Parameter
    holders: tuple[tuple[nn.Module, str], ...]


def quantize_rows(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the integer rows of a weight, and their scale. The scale is fp32 and has as many dimensions as the
    weight."""
    largest = torch.iinfo(dtype).max
    wide = weight.detach().float()
    scale = wide.abs().amax(dim=tuple(range(1, wide.dim())), keepdim=True) / largest
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)  # not 0, for rows of zeros
    return (wide / scale).round().clamp(-largest, largest).to(dtype), scale


def dequantize_rows(rows: Tensor, scale: Tensor) -> Tensor:
    """Returns the weight that integer rows and their scale represent, in fp32."""
    return rows.float() * scale


def parameters_with_uses(model: nn.Module) -> list[ParameterUses]:
    """Returns all parameters of a model. Each tied parameter occurs once."""
    uses: dict[int, ParameterUses] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            earlier = uses[id(weight)].holders if id(weight) in uses else ()
            uses[id(weight)] = ParameterUses(weight, (*earlier, (module, name)))
    return list(uses.values())


def store_as_integer_rows(model: nn.Module, parameters: Iterable[ParameterUses], dtype: torch.dtype) -> None:
    """Replaces these parameters of the model by integer rows, in place. The modules that hold a tied parameter share
    its rows."""
    for uses in parameters:
        rows, scale = quantize_rows(uses.weight, dtype)
        for module, name in uses.holders:
            if type(module) is nn.Embedding and module.max_norm is None and module is not model:
                _replace(model, module, RowEmbedding(module, rows, scale))
            else:
                parametrization = _Dequantized(rows, scale, uses.weight.dtype)
                parametrize.register_parametrization(module, name, parametrization, unsafe=True)


class RowEmbedding(nn.Module):
    """An embedding with integer weights. It dequantizes only the rows that are looked up."""

    rows: Tensor
    scale: Tensor

    def __init__(self, replaced: nn.Embedding, rows: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows)
        self.register_buffer("scale", scale)
        self._dtype = replaced.weight.dtype

    @property
    def weight(self) -> Tensor:
        """The dequantized table, for models that multiply by the weight of an embedding."""
        return dequantize_rows(self.rows, self.scale).to(self._dtype)

    def forward(self, indices: Tensor) -> Tensor:
        vectors = dequantize_rows(F.embedding(indices, self.rows), F.embedding(indices, self.scale))
        return vectors.to(self._dtype)


class _Dequantized(nn.Module):
    """A torch parametrization that stores a parameter as integer rows. Reading the parameter returns the dequantized
    weight."""

    rows: Tensor
    scale: Tensor

    def __init__(self, rows: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("rows", rows)
        self.register_buffer("scale", scale)
        self._dtype = dtype

    def forward(self, unused: Tensor) -> Tensor:
        return dequantize_rows(self.rows, self.scale).to(self._dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.new_empty(0)  # the parametrized tensor itself is not needed: the rows replace it


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replaces a submodule everywhere in the model, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)
