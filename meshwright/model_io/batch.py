"""Which entries of a batch go into the model and which into the loss; the same for training and for tracing.

- Tuple or list of several items: the last item is the target, the others are the model's positional arguments.
- Dict: the target is the entry named by the job's `data.target`, or else by target(s) or label(s); the other entries
  are the model's keyword arguments. Where a dict has no target, the loss receives the whole dict.
- Anything else, and the item of a tuple or list that has only one, is both the model's only argument and the target.

Without a loss function the model computes its loss itself, and gets the whole batch (`WHOLE_BATCH`): the entries of a
dict as keyword arguments, the items of a tuple or list as positional arguments. The target is then for metrics only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from meshwright.dtypes import widen_half
from meshwright.errors import InputError, did_you_mean
from meshwright.model_io.output_trees import map_traced, register_dataclasses

TARGET_KEYS = ("target", "targets", "label", "labels")
# Passed as the key of the target, this means that nothing is taken out of the batch before it goes into the model.
WHOLE_BATCH = "*"


@dataclass(frozen=True)
class ModelBatch:
    """One microbatch: the positional and keyword arguments of the model, and the target of the loss."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    target: Any


def target_key(key: str | None, has_loss: bool) -> str | None:
    """Returns the key of the target with which `split_batch` is called: `key`, which is the job's `data.target`, or
    `WHOLE_BATCH` if there is no loss function."""
    return key if has_loss else WHOLE_BATCH


def split_batch(data: Any, target_key: str | None = None) -> ModelBatch:
    """Separates a batch into the model's arguments and the target. `target_key` is the result of the function of that
    name."""
    if target_key == WHOLE_BATCH:
        return _whole_batch(data)
    if isinstance(data, Mapping):
        return _split_mapping(data, target_key)
    if isinstance(data, tuple | list) and len(data) > 1:
        return ModelBatch(tuple(data[:-1]), {}, data[-1])
    if isinstance(data, tuple | list):
        data = data[0]
    return ModelBatch((data,), {}, data)


def _split_mapping(data: Mapping[str, Any], target_key: str | None) -> ModelBatch:
    if target_key is not None and target_key not in data:
        raise InputError(f"data.target is '{target_key}', but batches have no such key{did_you_mean(target_key, data)}")
    key = target_key or next((key for key in TARGET_KEYS if key in data), None)
    if key is None:
        return ModelBatch((), dict(data), data)
    return ModelBatch((), {name: value for name, value in data.items() if name != key}, data[key])


def _whole_batch(data: Any) -> ModelBatch:
    if isinstance(data, Mapping):
        key = next((key for key in TARGET_KEYS if key in data), None)
        return ModelBatch((), dict(data), data if key is None else data[key])
    if isinstance(data, tuple | list):
        return ModelBatch(tuple(data), {}, data[-1])
    return ModelBatch((data,), {}, data)


def count_listed_samples(data: Any) -> int | None:
    """Returns the number of samples of a batch that has its samples in lists, because their sizes differ: one of its
    entries is a list of dicts, as the targets of a detector are. None for all other batches."""
    lists = [entry for entry in _entries(data) if type(entry) in (list, tuple)]
    if not lists:
        return None
    lengths = {len(entry) for entry in lists}
    has_dicts = any(len(entry) > 0 and all(isinstance(item, Mapping) for item in entry) for entry in lists)
    return lengths.pop() if has_dicts and len(lengths) == 1 else None


def take_listed(data: Any, indices: Sequence[int]) -> Any:
    """Returns the samples with these indices, of a batch for which `count_listed_samples` is not None."""
    size = count_listed_samples(data)

    def take(entry: Any) -> Any:
        if _is_list(entry):
            return type(entry)(entry[index] for index in indices)
        return entry[list(indices)] if isinstance(entry, Tensor) and entry.dim() > 0 and len(entry) == size else entry

    if isinstance(data, Mapping):
        return {name: take(entry) for name, entry in data.items()}
    return type(data)(take(entry) for entry in data)


def _entries(data: Any) -> list[Any]:
    if type(data) in (list, tuple):
        return list(data)
    return list(data.values()) if isinstance(data, Mapping) else []


def _is_list(value: Any) -> bool:
    return type(value) in (list, tuple)


def find_model_value(output: Any) -> Tensor | None:
    """Returns the loss in the output of a model that computes it; None if there is none. It is the output itself, its
    attribute or key `loss`, or the sum of a dict of scalars, which detectors return."""
    value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if value is None and isinstance(output, Mapping) and output and all(map(_is_scalar, output.values())):
        value = torch.stack([loss.reshape(()) for loss in output.values()]).sum()
    return value if _is_scalar(value) else None


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def at_least_fp32(output: Any) -> Any:
    """Returns a model's output in the same structure, with bf16 and fp16 tensors converted to fp32, because losses are
    computed in at least fp32."""
    if isinstance(output, Tensor):
        return widen_half(output)
    if torch.compiler.is_compiling():
        return map_traced(widen_half, output)
    register_dataclasses(output)
    return tree_map(widen_half, output)
