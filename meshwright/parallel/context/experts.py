"""Mixtures of experts in a model whose sequences are divided. Experts compute each token by itself, so a rank computes
its own tokens, and no function of a mixture's kernel needs a rule."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

from torch import Tensor, nn

from meshwright.parallel.context.sequence_view import SequenceSpec, SequenceView, gather, local_part
from meshwright.profile.experts import find_expert_layers


def call_on_local_tokens(function: Callable[..., Tensor], tokens: Tensor, *others: Tensor) -> Tensor:
    """Calls a function that maps tokens (…, width) to tensors with the same leading dimensions. If the tokens are
    divided by position, it is called with those of this rank, and so is its result. `others` have the same leading
    dimensions."""
    if not isinstance(tokens, SequenceView) or tokens.spec.shard.dim == tokens.dim() - 1:
        return function(*(gather(x) if isinstance(x, SequenceView) else x for x in (tokens, *others)))
    spec = tokens.spec
    local = [_local(x, spec, tokens.dim()) for x in others]
    output = function(tokens.local_tensor, *local)
    return SequenceView(output, spec, (*tokens.shape[:-1], output.shape[-1]))


def _local(x: Tensor, spec: SequenceSpec, dims: int) -> Tensor:
    """This rank's part of a tensor that has the leading dimensions of the tokens, or fewer."""
    wanted = replace(spec, shard=replace(spec.shard, dim=spec.shard.dim + x.dim() - dims))
    if isinstance(x, SequenceView) and x.spec == wanted:
        return x.local_tensor
    return local_part(gather(x) if isinstance(x, SequenceView) else x, wanted)


def compute_local_tokens(models: Sequence[nn.Module]) -> None:
    """From now on, modules with the stacked weights of experts compute the tokens of this rank, in place."""
    for model in models:
        for layer in find_expert_layers(model):
            if layer.kind == "stacked":
                _replace_forward(model.get_submodule(layer.module))


def _replace_forward(module: nn.Module) -> None:
    original_forward: Callable[..., Tensor] = module.forward
    signature = inspect.signature(original_forward)

    @wraps(original_forward)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return call_on_local_tokens(original_forward, *signature.bind(*args, **kwargs).arguments.values())

    module.forward = forward
