"""Converts linear layers so that torchao computes their products in fp8, forward and backward."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from meshwright.errors import InputError

_SIZE_MULTIPLE = 16  # the fp8 instructions want both sizes of a layer to be multiples of this
_FIRST_CAPABILITY = (8, 9)  # the compute capability of the first GPUs with fp8 instructions


def convert_linears_to_float8(module: nn.Module, device: torch.device, *, emulate: bool = False) -> None:
    """Replaces the linear layers of the module in place. Weights keep their values, dtypes and names. `emulate`
    computes the same rounding without fp8 instructions, slowly, on any device."""
    if not emulate:
        _check_hardware(device)
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise InputError(
            "plan.numerics.precision is fp8, which needs torchao: pip install 'meshwright[quantize]'"
        ) from None

    layers = set(_convertible_layers(module))
    if not layers:
        raise InputError(
            f"plan.numerics.precision is fp8, but {type(module).__name__} has no linear layer whose sizes are multiples"
            f" of {_SIZE_MULTIPLE}: choose bf16"
        )
    convert_to_float8_training(
        module, config=Float8LinearConfig(emulate=emulate), module_filter_fn=lambda layer, _: layer in layers
    )


def _convertible_layers(module: nn.Module) -> Iterator[nn.Linear]:
    """The linear layers whose sizes allow fp8. Layers with a tied weight are left out: they share it with an embedding
    and compute the logits, where fp8 costs most accuracy."""
    owners = Counter(id(p) for child in module.modules() for p in child._parameters.values() if p is not None)
    for layer in module.modules():
        if (
            not isinstance(layer, nn.Linear)
            or layer.in_features % _SIZE_MULTIPLE
            or layer.out_features % _SIZE_MULTIPLE
        ):
            continue
        if owners[id(layer.weight)] == 1:
            yield layer


def _check_hardware(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise InputError(
            f"plan.numerics.precision is fp8, for which {name} has no instructions (GPUs since Ada and Hopper have):"
            " choose bf16"
        )
