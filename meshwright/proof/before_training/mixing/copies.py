"""Copies of a model for trials: its code and its buffers, with weights that are drawn at random. A usual initialization
hides much, such as whatever comes before a last layer of zeros."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blocks.module_names import is_inside
from meshwright.proof.before_training.reduction import remove_blocks, series_of
from meshwright.proof.before_training.vocabulary import narrow_vocabulary
from meshwright.proof.reference.groups import uses_batch_statistics
from meshwright.proof.torch_private import AnyDropout

_SEED = 0


def without_weights(model: nn.Module, removed: tuple[str, ...] = ()) -> nn.Module:
    """Returns a copy of the model whose parameters are on the meta device, and whose buffers have their values. The
    blocks named in `removed` are left out. The model is not changed."""
    memo: dict[int, Any] = {id(model.get_submodule(name)): nn.Identity() for name in removed}
    for name, module in model.named_modules():
        if any(is_inside(name, block) for block in removed):
            continue
        for parameter in module.parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            memo.setdefault(id(parameter), nn.Parameter(empty, requires_grad=parameter.requires_grad))
        for value in vars(module).values():  # such as the weight of the older `weight_norm`, which is computed
            if isinstance(value, Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())
    copied = deepcopy(model, memo)
    remove_blocks(copied, series_of(model, removed), removed)
    return copied


def with_drawn_weights(
    empty: nn.Module, vocabularies: Mapping[int, int], dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Gives a model of `without_weights` parameters with random values, in place, and returns it. Floating-point
    parameters and buffers get `dtype`."""
    narrow_vocabulary(empty, vocabularies)
    generator = torch.Generator().manual_seed(_SEED)
    drawn: dict[int, nn.Parameter] = {}
    for module in empty.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in drawn:
                    values = _draw(parameter, dtype, generator).to(device)
                    drawn[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
                module._parameters[key] = drawn[id(parameter)]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device, dtype if buffer.is_floating_point() else None)
    return empty


def _draw(parameter: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draws values that keep activations at their size; those of vectors are around 1, as scales are."""
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    kind = parameter.dtype if parameter.is_complex() else dtype
    values = torch.randn(parameter.shape, generator=generator, dtype=kind)
    if parameter.dim() < 2:
        return 1 + 0.2 * values
    return values / max(1, values[0].numel()) ** 0.5 if values.shape[0] else values


def set_mode(model: nn.Module, training: bool) -> None:
    """Puts the model into training or evaluation mode. Dropout, and modules with running statistics, are in evaluation
    mode in both: plans say over which samples statistics are taken."""
    model.train(training)
    for module in model.modules():
        if isinstance(module, AnyDropout) or uses_batch_statistics(module):
            module.eval()
