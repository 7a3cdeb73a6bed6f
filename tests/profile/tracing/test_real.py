"""Batches of any size from a sample, whether its samples lie in tensors or in lists."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from meshwright.profile.tracing.real import is_real, real_batch, samples_in

CPU = torch.device("cpu")


def test_samples_in_tensors_are_counted_and_chosen() -> None:
    sample = (torch.arange(6), {"a": torch.zeros(6, 2), "b": torch.zeros(3)}, 4)
    assert samples_in(sample) == 6
    assert [leaf.shape[0] for leaf in tree_leaves(real_batch(sample, 2, CPU))[:3]] == [2, 2, 3]
    assert real_batch(sample, 8, CPU)[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]


def test_samples_in_lists_are_counted_and_chosen() -> None:
    pictures = ([torch.zeros(3, 8, 8)] * 4, [{"boxes": torch.zeros(2, 4)}] * 4)
    assert samples_in(pictures) == 4
    assert [len(entry) for entry in real_batch(pictures, 2, CPU)] == [2, 2]
    named: dict[str, Any] = {"images": [torch.full((3, 8, 8), float(n)) for n in range(4)], "size": 3}
    assert samples_in(named) == 4
    found = real_batch(named, 5, CPU)
    assert ([int(image.max()) for image in found["images"]], found["size"]) == ([0, 1, 2, 3, 0], 3)


def test_a_batch_is_a_copy() -> None:
    sample = torch.zeros(2, 3)
    real_batch(sample, 2, CPU).add_(1)
    assert not sample.any()


def test_what_has_no_values_is_not_real() -> None:
    sample = torch.zeros(2, 3)
    assert is_real(nn.Linear(3, 3), sample)
    assert not is_real(nn.Linear(3, 3).to("meta"), sample)
    assert not is_real(nn.Linear(3, 3), sample.to("meta"))
