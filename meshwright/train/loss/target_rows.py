"""Single samples of a target or a batch, for trials of losses (trial.py)."""

from typing import Any

import torch
from torch import Tensor

from meshwright.model_io.batch import count_listed_samples, take_listed
from meshwright.train.loss.joined import count_rows
from meshwright.train.torch_private import tree_map


def repeat_samples(target: Any, samples: int) -> Any:
    """The target or batch with exactly `samples` samples: its first ones or, if it has fewer, all of them again and
    again. Tensors are detached copies on the CPU, unless the samples are in lists."""
    count = count_listed_samples(target)
    if count is not None:
        return take_listed(target, [row % count for row in range(samples)])
    size = count_rows(target)

    def repeat(value: Any) -> Any:
        if not _has_rows(value) or value.shape[0] != size:
            return value
        return value.detach().cpu()[[row % size for row in range(samples)]]

    return tree_map(repeat, target)


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def sample_rows(target: Any, row: int, samples: int) -> Any:
    """One sample of a target or batch of so many samples."""
    if count_listed_samples(target) is not None:
        return take_listed(target, [row])

    def pick(value: Any) -> Any:
        return value[row : row + 1] if _has_rows(value) and value.shape[0] == samples else value

    return tree_map(pick, target)


def in_dtype(target: Any, dtype: torch.dtype) -> Any:
    """The target with its floating-point numbers in this dtype."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(cast, target)
