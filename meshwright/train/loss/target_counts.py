"""Losses that are a mean over some of a target's numbers: the places of a mask, tokens that are not padding, lengths,
weights of samples. Which numbers these are is found out by trying (trial.py), also with targets that `varied_targets`
returns: the sample batch may have rows of equal lengths only, for which such a mean is one over samples."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.train.torch_private import tree_flatten, tree_map, tree_unflatten

_IGNORED = (-100, -1, 255)  # numbers that mark targets to ignore
# What a mean may be divided by, and a number to put into a target for which it would be 0.
COUNTS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "sum": (torch.sum, 1),
    "number above 0": (lambda value: (value > 0).sum(), 1),
    "number that is not 0": (lambda value: (value != 0).sum(), 1),
    "number of at least 0": (lambda value: (value >= 0).sum(), 0),
    "number that is not -100": (lambda value: (value != -100).sum(), 0),
    "number that is not -1": (lambda value: (value != -1).sum(), 0),
    "number that is not 255": (lambda value: (value != 255).sum(), 0),
}


class CountedByTarget:
    """A loss function that returns a pair: the value of `function`, which is a mean, times the count that it is divided
    by, and this count. The count is the one of `COUNTS` with the name `rule`, of the tensor with the number `leaf` in
    the target."""

    def __init__(self, function: Callable[[Any, Any], Any], leaf: int, rule: str) -> None:
        self.function = function
        self.leaf = leaf
        self.rule = rule

    def __call__(self, output: Any, target: Any) -> tuple[Tensor, Tensor]:
        leaves, structure = tree_flatten(target)
        counted, count = leaves[self.leaf], self.count(target)
        # Without a target to count, the mean may be 0/0, which makes gradients NaN: other targets get the weight 0.
        leaves[self.leaf] = torch.where(count == 0, torch.full_like(counted, COUNTS[self.rule][1]), counted)
        return self.function(output, tree_unflatten(leaves, structure)) * count, count

    def count(self, target: Any) -> Tensor:
        """Returns what the mean over this target is divided by."""
        return COUNTS[self.rule][0](tree_flatten(target)[0][self.leaf])


def varied_targets(target: Any, samples: int) -> Iterator[tuple[Any, bool]]:
    """Yields targets in which one tensor differs from the given one: the last numbers of its rows are replaced by a
    small number, or by one that marks targets to ignore. Row k of n loses k/(n - 1) of its numbers, so the last loses
    all; of tensors with one number for each sample, two are replaced. With each target comes whether the new number is
    certainly a class or length like those of the given target: between 0 and its largest number."""
    leaves, structure = tree_flatten(target)
    for number, leaf in enumerate(leaves):
        if (
            not isinstance(leaf, Tensor)
            or leaf.dim() == 0
            or leaf.shape[0] != samples
            or not leaf.numel()
            or leaf.is_complex()
        ):
            continue
        for mark in _marks(leaf):
            varied = tree_unflatten([*leaves[:number], _replace_ends(leaf, mark), *leaves[number + 1 :]], structure)
            yield varied, 0 <= min(mark) <= max(mark) <= float(leaf.max())


def shorten_one_row(batch: Any) -> Any:
    """Returns a batch of two samples whose second one ends with padding: zeros in tensors of integers or of zeros and
    ones, such as token ids and masks, and ignored labels (-100) in tensors that have some already."""

    def shorten(value: Any) -> Any:
        if not has_rows(value, 2) or value.dim() < 2:
            return value
        is_mask = bool(((value == 0) | (value == 1)).all())
        if value.is_floating_point() and not is_mask:
            return value
        shorter = value.clone(memory_format=torch.contiguous_format)
        row = shorter.view(2, -1)[1]
        row[len(row) // 2 :] = _IGNORED[0] if bool((value == _IGNORED[0]).any()) else 0
        return shorter

    return tree_map(shorten, batch)


def has_rows(leaf: Any, samples: int) -> bool:
    """Whether this is a tensor of numbers with a row for each of the samples."""
    is_numbers = isinstance(leaf, Tensor) and leaf.numel() > 0 and not leaf.is_complex()
    return is_numbers and leaf.dim() > 0 and leaf.shape[0] == samples


def _marks(leaf: Tensor) -> list[tuple[float, float]]:
    """Returns pairs of numbers: one for rows 0, 2, …, and one for the others. Where they differ, a sum over the target
    and a number of places are told apart."""
    if leaf.is_floating_point():
        return [(0, 0), (1, 1), (0.5, 1)]
    if leaf.dtype == torch.bool:
        return [(0, 0), (1, 1)]
    limits = torch.iinfo(leaf.dtype)
    return [(0, 0), (1, 1), (2, 1), *((mark, mark) for mark in _IGNORED if limits.min <= mark <= limits.max)]


def _replace_ends(leaf: Tensor, mark: tuple[float, float]) -> Tensor:
    varied = leaf.clone(memory_format=torch.contiguous_format)
    if leaf.dim() == 1:
        varied[0], varied[1] = mark
        return varied
    rows = varied.view(len(leaf), -1)
    size = rows.shape[1]
    for number, row in enumerate(rows):
        row[size - size * number // (len(rows) - 1) :] = mark[number % 2]
    return varied
