"""Moves batches to a device, counts their samples, and cuts them into microbatches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.blocks.image_layout import channels_last_format
from meshwright.data.batch import Microbatch
from meshwright.data.prepared import PreparedShare
from meshwright.errors import InputError
from meshwright.model_io.batch import count_listed_samples, take_listed
from meshwright.model_io.output_trees import register_dataclasses
from meshwright.plan import Plan
from meshwright.train.torch_private import tree_map


def move_to_device(data: Any, device: torch.device, *, channels_last: bool = False) -> Any:
    """Returns the batch with its tensors on the device. With `channels_last`, images and volumes get that memory
    format. Copies from pinned memory to a GPU are asynchronous."""
    if device.type == "cpu" and not channels_last:
        return data

    def move(value: Tensor) -> Tensor:
        memory_format = channels_last_format(value) if channels_last else torch.preserve_format
        return value.to(device, non_blocking=True, memory_format=memory_format)

    return map_tensors(move, data)


def map_tensors(function: Callable[[Tensor], Tensor], data: Any) -> Any:
    """Returns the batch with `function` applied to all of its tensors. The same as `tree_map`, which takes longer than
    launching an operator, therefore plain tuples, lists and dicts are traversed here."""
    if isinstance(data, Tensor):
        return function(data)
    if type(data) is tuple or type(data) is list:
        return type(data)([map_tensors(function, value) for value in data])
    if type(data) is dict:
        return {key: map_tensors(function, value) for key, value in data.items()}
    register_dataclasses(data)
    return tree_map(lambda value: function(value) if isinstance(value, Tensor) else value, data)


def tensors_in(data: Any) -> list[Tensor]:
    """Returns the tensors of a batch, in the order of `map_tensors`."""
    tensors: list[Tensor] = []

    def add(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(add, data)
    return tensors


def samples_in(data: Any) -> int:
    """The number of samples in a batch: the length of its lists of samples, or else the size of dimension 0 of its
    first tensor that has dimensions."""
    listed = count_listed_samples(data)
    if listed is not None:
        return listed
    if type(data) is tuple and data and isinstance(data[0], Tensor) and data[0].dim() > 0:
        return len(data[0])
    for tensor in tensors_in(data):
        if tensor.dim() > 0:
            return int(tensor.shape[0])
    raise InputError("the batch holds no tensor, so its size is unknown: make the loader return tensors")


def cut_share(share: PreparedShare, plan: Plan) -> tuple[list[Microbatch], int | None]:
    """Cuts a rank's share of a global batch into the plan's number of microbatches. Returns them, and the number of
    samples over all ranks, or None if it is not known.

    If the number over all ranks is known, every rank gets as many microbatches as the rank with the most samples needs.
    Missing ones repeat the last one with weight 0.
    """
    if plan.microbatches == 1:
        return [Microbatch(share.data, share.samples)], share.global_samples
    counts = share.samples > 0
    parts = split_into_microbatches(share.data, plan.microbatches)
    microbatches = [Microbatch(part, samples_in(part) if counts else 0) for part in parts]
    if share.most_samples is not None:
        missing = min(plan.microbatches, share.most_samples) - len(microbatches)
        microbatches += [Microbatch(parts[-1], 0)] * missing
    return microbatches, share.global_samples


def split_into_microbatches(data: Any, parts: int) -> list[Any]:
    """Cuts a batch along dimension 0, or its lists of samples, into `parts` microbatches, or into one per sample if it
    has fewer samples. Values without a dimension of the samples are the same in every microbatch."""
    if parts == 1:
        return [data]
    size = samples_in(data)
    bounds = [(size * part // parts, size * (part + 1) // parts) for part in range(parts)]

    def cut(begin: int, end: int) -> Any:
        if count_listed_samples(data) is not None:
            return take_listed(data, range(begin, end))

        def narrow(value: Any) -> Any:
            has_samples = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == size
            return value[begin:end] if has_samples else value

        return tree_map(narrow, data)

    return [cut(begin, end) for begin, end in bounds if end > begin]
