"""Quantizes the weights of a model. torchao quantizes linear layers, and `rows.py` all others:

| layers | int8 | int16 |
| --- | --- | --- |
| linear layers | torchao; with `dynamic` their inputs as well, at every call | not quantized |
| convolutions, projections inside `nn.MultiheadAttention` | rows.py | not quantized |
| embeddings, and layers tied to one | rows.py | rows.py |
"""

from copy import deepcopy
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear  # attention reads its weight directly

from meshwright.errors import InputError
from meshwright.export.program import quiet
from meshwright.export.rows import (
    ParameterUses,
    dequantize_rows,
    parameters_with_uses,
    quantize_rows,
    store_as_integer_rows,
)

Width = Literal["int8", "int16"]
DTYPES: dict[Width, torch.dtype] = {"int8": torch.int8, "int16": torch.int16}
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NAMES = ("weight", "in_proj_weight")
ROWS, SCALE = ".rows", ".scale"


def quantizable_parameters(model: nn.Module, width: Width) -> list[ParameterUses]:
    """Returns the parameters that `quantize` stores as integers of this width."""
    kinds = EMBEDDINGS if width == "int16" else (*EMBEDDINGS, *CONVOLUTIONS, nn.Linear, nn.MultiheadAttention)
    return [
        uses
        for uses in parameters_with_uses(model)
        if uses.weight.is_floating_point() and any(isinstance(m, kinds) and name in NAMES for m, name in uses.holders)
    ]


def quantize(model: nn.Module, width: Width, dynamic: bool = False) -> nn.Module:
    """Returns a copy of the model with integer weights. They are plain tensors, so torch.export accepts the copy like
    any model. With `dynamic`, the inputs of linear layers are quantized as well."""
    copy = deepcopy(model)
    parameters = quantizable_parameters(copy, width)
    linears = {id(module) for uses in parameters if _is_linear_weight(uses) for module, _ in uses.holders}
    others = [uses for uses in parameters if not _is_linear_weight(uses)]
    if linears:
        _quantize_with_torchao(copy, linears, dynamic)
    store_as_integer_rows(copy, others, DTYPES[width])
    return copy


def quantized_state(model: nn.Module, width: Width) -> dict[str, Tensor]:
    """Returns a state dict for models that torch.export cannot export. Weights that are not quantized stand under their
    names. A quantized weight is replaced by `name.rows` (integers) and `name.scale`; the weight is their product."""
    parameters = quantizable_parameters(model, width)
    integers = {id(uses.weight): quantize_rows(uses.weight, DTYPES[width]) for uses in parameters}
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in integers:
            state[name + ROWS], state[name + SCALE] = integers[id(value)]
        elif isinstance(value, Tensor):
            state[name] = value.detach()
    return state


def read_quantized_state(model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    """Loads a state dict of `quantized_state` into a model, and returns the model."""
    whole = {name: value for name, value in state.items() if not name.endswith((ROWS, SCALE))}
    for name in state:
        if name.endswith(ROWS):
            weight = name.removesuffix(ROWS)
            whole[weight] = dequantize_rows(state[name], state[weight + SCALE])
    model.load_state_dict(whole, strict=False)  # extra state that is no tensor keeps its initial value
    return model


def _is_linear_weight(uses: ParameterUses) -> bool:
    """Whether the parameter is the weight of exactly one linear layer. A tied weight is not, because torchao would
    store a second copy of it; `rows.py` quantizes it instead."""
    (module, _), *others = uses.holders
    return isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear) and not others


def _quantize_with_torchao(model: nn.Module, linears: set[int], dynamic: bool) -> None:
    """Quantizes the linear layers with these ids in place."""
    try:
        with quiet():
            from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
            from torchao.utils import unwrap_tensor_subclass
    except ImportError as error:
        raise InputError(f"--to int8 needs torchao ({error}): pip install 'meshwright[quantize]'") from None
    config = Int8DynamicActivationInt8WeightConfig if dynamic else Int8WeightOnlyConfig
    with quiet():
        quantize_(model, config(set_inductor_config=False), filter_fn=lambda module, _: id(module) in linears)
        # A program that holds torchao's tensor subclasses can be loaded only with torchao: use plain tensors instead.
        unwrap_tensor_subclass(nn.ModuleList([model]))  # wrapped, since it visits children and the model may be a layer
