"""Batches of any size are made from a sample batch, whose samples may be in tensors or in lists."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from meshwright.profile.tracing.real_tensors import batch_of_samples, has_values, sample_count

CPU = torch.device("cpu")


def test_samples_in_tensors_are_counted_and_picked() -> None:
    sample = (torch.arange(6), {"a": torch.zeros(6, 2), "b": torch.zeros(3)}, 4)
    assert sample_count(sample) == 6
    assert [leaf.shape[0] for leaf in tree_leaves(batch_of_samples(sample, 2, CPU))[:3]] == [2, 2, 3]
    assert batch_of_samples(sample, 8, CPU)[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]


def test_samples_in_lists_are_counted_and_picked() -> None:
    pictures = ([torch.zeros(3, 8, 8)] * 4, [{"boxes": torch.zeros(2, 4)}] * 4)
    assert sample_count(pictures) == 4
    assert [len(entry) for entry in batch_of_samples(pictures, 2, CPU)] == [2, 2]
    named: dict[str, Any] = {"images": [torch.full((3, 8, 8), float(n)) for n in range(4)], "size": 3}
    assert sample_count(named) == 4
    batch = batch_of_samples(named, 5, CPU)
    assert ([int(image.max()) for image in batch["images"]], batch["size"]) == ([0, 1, 2, 3, 0], 3)


def test_a_batch_is_a_copy() -> None:
    sample = torch.zeros(2, 3)
    batch_of_samples(sample, 2, CPU).add_(1)
    assert not sample.any()


def test_tensors_on_the_meta_device_have_no_values() -> None:
    sample = torch.zeros(2, 3)
    assert has_values(nn.Linear(3, 3), sample)
    assert not has_values(nn.Linear(3, 3).to("meta"), sample)
    assert not has_values(nn.Linear(3, 3), sample.to("meta"))
