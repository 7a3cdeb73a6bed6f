"""A model and a batch with memory: what may run for real, where the model has values, on the device it lies on."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.profile.fake import batch_size
from meshwright.profile.gpu_rules import GpuRules


def is_real(model: nn.Module, sample: Any) -> bool:
    """Whether the model and the sample have values, on whatever device."""
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves(sample)]
    return not any(isinstance(t, FakeTensor) or (isinstance(t, Tensor) and t.is_meta) for t in tensors)


def device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu"))


def samples_in(sample: Any) -> int:
    """The leading size that the batch's tensors share; where they lie in lists (images of many sizes, say), the
    length that the lists share."""
    entries = _entries(sample)
    if any(isinstance(entry, Tensor) for entry in entries):
        return batch_size([entry for entry in entries if isinstance(entry, Tensor)])
    lengths = Counter(len(entry) for entry in entries if isinstance(entry, list | tuple))
    return lengths.most_common(1)[0][0] if lengths else batch_size(sample)


def real_batch(sample: Any, number: int, device: torch.device) -> Any:
    """A copy of the first `number` samples on the device; where there are fewer, they come again from the first."""
    own = samples_in(sample)

    def picked(entry: Any) -> Any:
        return [entry[place % own] for place in range(number)]

    def narrowed(leaf: Any) -> Any:
        return torch.stack(picked(leaf)) if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == own else leaf

    if any(isinstance(entry, Tensor) for entry in _entries(sample)):
        batch = tree_map(narrowed, sample)
    else:
        shorter = [picked(e) if isinstance(e, list | tuple) and len(e) == own else e for e in _entries(sample)]
        batch = dict(zip(sample, shorter, strict=True)) if isinstance(sample, dict) else type(sample)(shorter)
    return tree_map(lambda leaf: leaf.detach().clone().to(device) if isinstance(leaf, Tensor) else leaf, batch)


def _entries(sample: Any) -> list[Any]:
    if isinstance(sample, dict):
        return list(sample.values())
    return list(sample) if isinstance(sample, list | tuple) else [sample]


@contextmanager
def same_chance(device: torch.device) -> Iterator[None]:
    """Random numbers drawn inside are drawn again outside, whoever draws them."""
    python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(of_numpy)


class RealRules(GpuRules):
    """A GPU's rules for real tensors of a CPU: the stand-in for its RMS norm computes nothing, so the CPU's runs."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "rms_norm":
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)
