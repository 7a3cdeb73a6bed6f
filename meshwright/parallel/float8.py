"""Linear layers whose products are computed in 8 bits, forward and backward, through torchao."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from meshwright.errors import InputError

_MULTIPLE = 16  # of both sizes of a layer, that the instructions want
_CAPABILITY = (8, 9)  # of the first GPUs that have them


def eight_bits(module: nn.Module, device: torch.device, *, emulate: bool = False) -> None:
    """Replaces the layers in place; weights stay as they are, under their names. `emulate` computes the same rounding
    without the instructions, slowly."""
    if not emulate:
        _check_hardware(device)
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise InputError(
            "plan.numerics.precision is fp8, which needs torchao: pip install 'meshwright[quantize]'"
        ) from None

    layers = set(_fitting(module))
    if not layers:
        raise InputError(
            f"plan.numerics.precision is fp8, but {type(module).__name__} has no linear layer whose sizes are multiples"
            f" of {_MULTIPLE}: choose bf16"
        )
    convert_to_float8_training(
        module, config=Float8LinearConfig(emulate=emulate), module_filter_fn=lambda layer, _: layer in layers
    )


def _fitting(module: nn.Module) -> Iterator[nn.Linear]:
    """All but those whose weight is tied: it is an embedding too, and the scores are where 8 bits cost the most."""
    owners = Counter(id(p) for part in module.modules() for p in part._parameters.values() if p is not None)
    for layer in module.modules():
        if not isinstance(layer, nn.Linear) or layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE:
            continue
        if owners[id(layer.weight)] == 1:
            yield layer


def _check_hardware(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _CAPABILITY:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise InputError(
            f"plan.numerics.precision is fp8, for which {name} has no instructions (GPUs since Ada and Hopper have):"
            " choose bf16"
        )
