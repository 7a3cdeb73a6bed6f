"""Writes and reads safetensors files, with the model's names and dtypes, or with parameters in bf16."""

from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from meshwright.errors import InputError


def write_weights(model: nn.Module, file: Path, metadata: dict[str, str]) -> None:
    """Writes all weights and buffers. A tied weight is written once; the metadata of the file map its other names to
    the name under which it is stored."""
    objects = [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if objects:
        raise InputError(f"{objects[0]} is no tensor, and a safetensors file holds tensors only: use --to program")
    try:
        save_model(model, str(file), dict(metadata))
    except RuntimeError as error:  # weights that share only a part of their memory
        raise InputError(f"safetensors cannot hold this model: {' '.join(str(error).split())}") from None


def read_weights(model: nn.Module, file: Path) -> nn.Module:
    """Loads a file into a model, converting values to the model's dtypes, and returns the model."""
    load_model(model, file)
    return model


def copy_in_bf16(model: nn.Module) -> nn.Module:
    """Returns a copy of the model with its floating-point parameters in bf16. Buffers are not rounded, because a
    running variance or a table of frequencies is small, but rounding it changes every output."""
    copy = deepcopy(model)
    with torch.no_grad():
        for parameter in copy.parameters():  # yields a tied parameter once, so that it stays tied
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.bfloat16)
    return copy


def size_bytes(model: nn.Module) -> int:
    """Returns the size of all parameters and saved buffers in bytes. Tied ones are counted once."""
    tensors = [value for value in model.state_dict().values() if isinstance(value, Tensor)]
    return sum({value.data_ptr(): value.numel() * value.element_size() for value in tensors}.values())
