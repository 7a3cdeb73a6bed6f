"""Helpers for running real training steps of models that cannot be traced on fake tensors: the model's device, batches
of real tensors, and the state of the random generators."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from meshwright.model_io.batch import count_listed_samples, take_listed
from meshwright.model_io.output_trees import register_dataclasses
from meshwright.profile.fake import batch_size
from meshwright.profile.gpu_rules import GpuRules
from meshwright.profile.torch_private import FakeTensor, tree_leaves, tree_map


def has_values(model: nn.Module, sample: Any) -> bool:
    """Whether all tensors of the model and of the sample have values, which fake tensors and tensors on the meta device
    do not have."""
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves(sample)]
    return not any(isinstance(t, FakeTensor) or (isinstance(t, Tensor) and t.is_meta) for t in tensors)


def model_device(model: nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer; the CPU for a model that has neither."""
    return next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu"))


def sample_count(sample: Any) -> int:
    """Number of samples in a batch: the most frequent size of dimension 0 among its tensors. If the tensors are in
    lists (images of different sizes, say), the most frequent length of the lists."""
    listed = count_listed_samples(sample)
    if listed:
        return listed
    entries = _entries(sample)
    if any(isinstance(entry, Tensor) for entry in entries):
        return batch_size([entry for entry in entries if isinstance(entry, Tensor)])
    lengths = Counter(len(entry) for entry in entries if isinstance(entry, list | tuple))
    return lengths.most_common(1)[0][0] if lengths else batch_size(sample)


def batch_of_samples(sample: Any, number: int, device: torch.device) -> Any:
    """Returns a copy of the first `number` samples on the device. If the batch has fewer samples, they are repeated in
    order."""
    size = sample_count(sample)
    if number == size:  # whichever dimension the samples are in
        return _copy_to(sample, device)
    if count_listed_samples(sample):
        return _copy_to(take_listed(sample, [index % size for index in range(number)]), device)

    def pick(entry: Any) -> Any:
        return [entry[index % size] for index in range(number)]

    def pick_rows(leaf: Any) -> Any:
        return torch.stack(pick(leaf)) if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size else leaf

    register_dataclasses(sample)
    if any(isinstance(entry, Tensor) for entry in _entries(sample)):
        batch = tree_map(pick_rows, sample)
    else:
        entries = [pick(e) if isinstance(e, list | tuple) and len(e) == size else e for e in _entries(sample)]
        batch = dict(zip(sample, entries, strict=True)) if isinstance(sample, Mapping) else type(sample)(entries)
    return _copy_to(batch, device)


def _copy_to(batch: Any, device: torch.device) -> Any:
    register_dataclasses(batch)
    return tree_map(lambda leaf: leaf.detach().clone().to(device) if isinstance(leaf, Tensor) else leaf, batch)


def _entries(sample: Any) -> list[Any]:
    if isinstance(sample, Mapping):
        return list(sample.values())
    return list(sample) if isinstance(sample, list | tuple) else [sample]


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """On leaving this context, the random generators of Python, numpy and torch get their previous states back."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


class GpuRulesForRealTensors(GpuRules):
    """`GpuRules` for real tensors on a CPU. RMS norm runs as on the CPU, because the fused RMS norm has no kernel."""

    def __init__(self) -> None:
        super().__init__(fixes_random_scalars=False)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "rms_norm":
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)
