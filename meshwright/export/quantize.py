"""Which weights become integers: torchao takes layers that multiply by a matrix, `rows` the others.

| | int8 | int16 |
| --- | --- | --- |
| linear layers | torchao; with `dynamic` their inputs as well, at every call | as they are |
| convolutions, attention's own projections | rows | as they are |
| embeddings, and layers tied to one | rows | rows |
"""

from copy import deepcopy
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear  # attention multiplies by its weight itself

from meshwright.errors import InputError
from meshwright.export.program import quiet
from meshwright.export.rows import Held, held, keep_as_rows, quantized, restored

Width = Literal["int8", "int16"]
DTYPES: dict[Width, torch.dtype] = {"int8": torch.int8, "int16": torch.int16}
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NAMES = ("weight", "in_proj_weight")
ROWS, SCALE = ".rows", ".scale"


def chosen(model: nn.Module, width: Width) -> list[Held]:
    """The parameters that become integers."""
    kinds = EMBEDDINGS if width == "int16" else (*EMBEDDINGS, *CONVOLUTIONS, nn.Linear, nn.MultiheadAttention)
    return [
        each
        for each in held(model)
        if each.weight.is_floating_point() and any(isinstance(m, kinds) and name in NAMES for m, name in each.holders)
    ]


def quantize(model: nn.Module, width: Width, dynamic: bool = False) -> nn.Module:
    """A copy that runs on integers, made of plain tensors: torch.export takes it as any other model."""
    copy = deepcopy(model)
    integers = chosen(copy, width)
    linears = {id(module) for each in integers if _multiplies(each) for module, _ in each.holders}
    rest = [each for each in integers if not _multiplies(each)]
    if linears:
        _through_torchao(copy, linears, dynamic)
    keep_as_rows(copy, rest, DTYPES[width])
    return copy


def quantized_state(model: nn.Module, width: Width) -> dict[str, Tensor]:
    """For models that no program can be made of: ordinary weights by name, and for each that became integers
    `name.rows` and `name.scale`, whose product it is."""
    integers = {id(each.weight): quantized(each.weight, DTYPES[width]) for each in chosen(model, width)}
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in integers:
            state[name + ROWS], state[name + SCALE] = integers[id(value)]
        elif isinstance(value, Tensor):
            state[name] = value.detach()
    return state


def read_quantized_state(model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    """Fills a model from what `quantized_state` made."""
    whole = {name: value for name, value in state.items() if not name.endswith((ROWS, SCALE))}
    for name in state:
        if name.endswith(ROWS):
            own = name.removesuffix(ROWS)
            whole[own] = restored(state[name], state[own + SCALE])
    model.load_state_dict(whole, strict=False)  # what is no tensor has the value that its code gave it
    return model


def _multiplies(each: Held) -> bool:
    """Whether it is the weight of one linear layer. A tied one would be kept once more by torchao, apart."""
    (module, _), *others = each.holders
    return isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear) and not others


def _through_torchao(model: nn.Module, linears: set[int], dynamic: bool) -> None:
    try:
        with quiet():
            from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
            from torchao.utils import unwrap_tensor_subclass
    except ImportError as error:
        raise InputError(f"--to int8 needs torchao ({error}): pip install 'meshwright[quantize]'") from None
    config = Int8DynamicActivationInt8WeightConfig if dynamic else Int8WeightOnlyConfig
    with quiet():
        quantize_(model, config(set_inductor_config=False), filter_fn=lambda module, _: id(module) in linears)
        # Its tensors know how to compute with themselves, but a program that holds such ones loads with torchao only.
        unwrap_tensor_subclass(nn.ModuleList([model]))  # it looks at children, and the model may be a layer itself
