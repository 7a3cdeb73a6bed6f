"""Weights as a safetensors file: under the model's own names and in its own dtypes, or with parameters in bf16."""

from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from meshwright.errors import InputError


def write_weights(model: nn.Module, file: Path, about: dict[str, str]) -> None:
    """A tied weight is written once; the metadata say which name stands for which other."""
    objects = [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if objects:
        raise InputError(f"{objects[0]} is no tensor, and safetensors holds nothing else: use --to program")
    try:
        save_model(model, str(file), dict(about))
    except RuntimeError as error:  # weights that are parts of each other
        raise InputError(f"safetensors cannot hold this model: {' '.join(str(error).split())}") from None


def read_weights(model: nn.Module, file: Path) -> nn.Module:
    """Fills a model from a file; what is stored in fewer bits is widened to the model's own dtypes."""
    load_model(model, file)
    return model


def in_bf16(model: nn.Module) -> nn.Module:
    """A copy with its floating parameters in bf16. Buffers stay: a running variance or a table of frequencies is
    small, and where it is rounded every output is off."""
    copy = deepcopy(model)
    with torch.no_grad():
        for parameter in copy.parameters():  # each tied one once, so they stay tied
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.bfloat16)
    return copy


def size_bytes(model: nn.Module) -> int:
    """Of all parameters and saved buffers, those that are tied counted once."""
    tensors = [value for value in model.state_dict().values() if isinstance(value, Tensor)]
    return sum({value.data_ptr(): value.numel() * value.element_size() for value in tensors}.values())
