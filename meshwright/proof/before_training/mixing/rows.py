"""The batches of a trial whether a model mixes samples, and the comparison of what the model returns for them.

    whole    = s₁ … sₖ
    reversed = v, sₖ … s₁          one sample more, in the opposite order, and v is another sample
    halves   = s₁ … sⱼ           and the others, as two ranks get them
    replaced = s₁ … sₖ₋₁, v        the same number of samples, in the same order

A model that treats samples by themselves returns the same for each sᵢ in all of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.model_io.output_trees import register_dataclasses
from meshwright.proof.torch_private import tree_leaves, tree_map

_SEED = 0

Pairs = Sequence[tuple[int, int]]
"""The positions of the same samples in two batches."""


def whole_batch(batch: Any, samples: int, size: int) -> Any:
    """Returns a batch of `size` different samples; a batch that has fewer is continued with changed ones."""
    rows = [row % samples for row in range(size)]
    return _map_rows(batch, samples, lambda value: _fill(value, rows, samples))


def reversed_batch(batch: Any, size: int) -> tuple[Any, Pairs]:
    """Returns the samples of a batch in reversed order behind another sample, and the positions of equal samples."""
    made = _map_rows(batch, size, lambda value: torch.cat([_changed(value[:1], 1), value.flip(0)]))
    return made, [(row, size - row) for row in range(size)]


def half_batches(batch: Any, size: int, cut: int | None = None) -> list[tuple[Any, Pairs, int]]:
    """Returns both halves of the batch, or what is before and behind `cut`, the positions of equal samples, and the
    number of samples of each part."""
    cut = size // 2 if cut is None else cut
    halves: list[tuple[Any, Pairs, int]] = []
    for begin, end in ((0, cut), (cut, size)):
        made = _map_rows(batch, size, lambda value, begin=begin, end=end: value[begin:end])
        halves.append((made, [(row, row - begin) for row in range(begin, end)], end - begin))
    return halves


def replaced_batch(batch: Any, size: int) -> tuple[Any, Pairs]:
    """Returns the batch with another sample in place of the last one, and the positions of equal samples."""
    made = _map_rows(batch, size, lambda value: torch.cat([value[:-1], _changed(value[:1], 1)]))
    return made, [(row, row) for row in range(size - 1)]


def _map_rows(batch: Any, samples: int, change: Any) -> Any:
    def apply(value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == samples
        return change(value) if has_rows else value

    return tree_map(apply, batch)


def _fill(value: Tensor, rows: list[int], samples: int) -> Tensor:
    parts = [
        value[row : row + 1] if number < samples else _changed(value[row : row + 1], number)
        for number, row in enumerate(rows)
    ]
    return torch.cat(parts)


def _changed(row: Tensor, number: int) -> Tensor:
    """Returns another sample of the same kind: its numbers in another order, and scaled if they are real numbers.
    Classes and tokens stay among those that the sample has."""
    flat = row.flatten()
    moved = flat.roll(number) if flat.numel() > 1 else flat
    if row.is_floating_point():
        generator = torch.Generator().manual_seed(_SEED + number)
        moved = moved * (4 * torch.rand(flat.shape, generator=generator, dtype=torch.float64) - 2).to(flat)
    return moved.view(row.shape)


def sample_dims(first: Tensor, second: Tensor, sizes: tuple[int, int]) -> list[int]:
    """Returns the dimensions of two tensors that grow with the numbers of samples from which they were computed."""
    if first.dim() != second.dim():
        return []
    grown = zip(first.shape, second.shape, strict=True)
    return [
        dim
        for dim, (a, b) in enumerate(grown)
        if a and a % sizes[0] == 0 and a * sizes[1] == b * sizes[0] and (a != b or sizes[0] == sizes[1])
    ]


def compared_leaves(output: Any) -> list[Tensor]:
    """Returns the tensors of a model's output that training can follow: those with a gradient, or all real numbers if
    none has."""
    register_dataclasses(output)
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    leaves = [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
    return [leaf for leaf in leaves if leaf.requires_grad] or leaves


def by_sample(value: Tensor, dim: int, samples: int) -> list[Tensor]:
    """Returns the tensor with its samples in dimension 0. If it has several rows for each sample, they may be next to
    each other or not, and both readings are returned."""
    value = torch.view_as_real(value) if value.is_complex() else value
    rows = value.shape[dim] // samples
    if rows == 1:
        return [value.movedim(dim, 0)]
    next_to = value.unflatten(dim, (samples, rows)).movedim(dim, 0)
    apart = value.unflatten(dim, (rows, samples)).movedim(dim + 1, 0)
    return [next_to, apart]


def is_same(first: Tensor, second: Tensor, pairs: Pairs, tolerance: float) -> bool:
    """Whether the rows of these pairs are equal. Where sequences were padded to different lengths, the common part
    counts."""
    a, b = first.detach()[[row for row, _ in pairs]], second.detach()[[row for _, row in pairs]]
    if a.dim() != b.dim():
        return True
    for dim, (size, other) in enumerate(zip(a.shape, b.shape, strict=True)):
        if size != other:
            a, b = a.narrow(dim, 0, min(size, other)), b.narrow(dim, 0, min(size, other))
    scale = a.nan_to_num(0, 0, 0).abs().max() if a.numel() else 0.0
    return bool(torch.isclose(a, b, rtol=0, atol=float(scale) * tolerance or 1e-300, equal_nan=True).all())
