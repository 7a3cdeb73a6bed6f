"""A model and a batch without memory: twins whose tensors have shapes and types but no bytes."""

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.errors import InputError


def fake_model(model: nn.Module, mode: FakeTensorMode, left_out: Iterable[str] = ()) -> nn.Module:
    """A copy of the model's structure, tied weights still tied, on fake CPU tensors; the model is left alone. Modules
    that are left out are not copied: something empty stands in their place."""
    memo: dict[int, Any] = {id(model.get_submodule(name)): nn.Identity() for name in left_out}
    gone = {id(module) for name in left_out for module in model.get_submodule(name).modules()}
    with mode:
        for module in model.modules():
            if id(module) in gone:
                continue
            for parameter in module.parameters(recurse=False):
                twin = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                memo.setdefault(id(parameter), nn.Parameter(twin, requires_grad=parameter.requires_grad))
            for buffer in module.buffers(recurse=False):
                memo.setdefault(id(buffer), torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu"))
    return copy.deepcopy(model, memo)


def batch_size(sample: Any) -> int:
    """The leading size that the batch's tensors share."""
    sizes = [leaf.shape[0] for leaf in tree_leaves(sample) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not sizes:
        raise InputError("the sample batch holds no tensor with a batch dimension")
    return max(set(sizes), key=sizes.count)


def fake_batch(sample: Any, size: int, mode: FakeTensorMode) -> Any:
    """The sample batch with another number of samples, without memory."""
    own = batch_size(sample)

    def twin(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = (size, *value.shape[1:]) if value.dim() > 0 and value.shape[0] == own else value.shape
        return torch.empty(shape, dtype=value.dtype, device="cpu")

    with mode:
        return tree_map(twin, sample)


@contextmanager
def one_sequence(sample: Any) -> Iterator[None]:
    """That rows of tokens are one sequence each, for transformers: it looks at their positions, and where these have no
    numbers it assumes several, and masks attention that would have been causal: twice the work of what will run. A
    batch that brings positions may well have several."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    looked = getattr(masks, "find_packed_sequence_indices", None)
    if looked is None or _has_positions(sample):
        yield
        return
    masks.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = looked


def _has_positions(sample: Any) -> bool:
    if isinstance(sample, Mapping):
        return "position_ids" in sample or any(map(_has_positions, sample.values()))
    return isinstance(sample, list | tuple) and any(map(_has_positions, sample))


def bytes_in(batch: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
