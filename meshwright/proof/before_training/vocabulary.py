"""Makes the vocabulary of a model small for its check: most weights of a language model whose equal blocks are left out
are those of its embedding and its head."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from meshwright.proof.torch_private import tree_map

LARGEST = 4096  # tokens of a vocabulary that is left as it is
_TOKENS = 512  # of a vocabulary that is made small


def large_vocabularies(model: nn.Module) -> dict[int, int]:
    """Returns the sizes of large vocabularies, and the sizes that they are made."""
    sizes = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    return {size: _TOKENS for size in sorted(sizes) if size > LARGEST}


def narrow_vocabulary(model: nn.Module, sizes: Mapping[int, int]) -> None:
    """Keeps the first rows of embeddings, and of linear layers that compute scores of as many tokens, in place. Tied
    weights stay tied. Numbers of tokens in attributes and in a model's configuration are changed, too."""
    narrowed: dict[int, nn.Parameter] = {}
    kept_alive: list[nn.Parameter] = []  # ids are reused
    for module in model.modules():
        layer_size = getattr(module, "num_embeddings", getattr(module, "out_features", 0))
        for holder in (module, getattr(module, "config", None)):
            for key, value in list(vars(holder).items()) if holder is not None else ():
                if type(value) is int and value in sizes:
                    setattr(holder, key, sizes[value])
        for key, parameter in list(module._parameters.items()):
            size = sizes.get(layer_size) if isinstance(module, nn.Embedding | nn.Linear) else None
            if parameter is None or size is None:
                continue
            if id(parameter) not in narrowed:
                rows = parameter.detach()[:size].clone()
                narrowed[id(parameter)] = nn.Parameter(rows, parameter.requires_grad)
                kept_alive.append(parameter)
                narrowed[id(narrowed[id(parameter)])] = narrowed[id(parameter)]
            module._parameters[key] = narrowed[id(parameter)]


def narrow_tokens(batch: Any, sizes: Mapping[int, int]) -> Any:
    """Returns the batch with tokens of the small vocabulary. Negative numbers, which mark ignored targets, stay."""

    def narrow(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex() or not value.numel():
            return value
        largest = int(value.max())
        size = next((size for size in sizes if largest < size), None)
        return value if size is None or largest < sizes[size] else value.where(value < 0, value % sizes[size])

    return tree_map(narrow, batch) if sizes else batch
