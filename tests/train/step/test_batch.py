"""What of a batch goes into the model and what into the loss: tuples, dicts, and anything else."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.model_io.batch import split_batch
from meshwright.train.step.batch import move_to_device, samples_in, split_into_microbatches, tensors_in

X, Y, Z = torch.zeros(4, 2), torch.ones(4), torch.full((4, 3), 2.0)


@pytest.mark.parametrize(
    ("data", "arguments", "keywords", "target"),
    [
        ((X, Y), (X,), {}, Y),
        ([X, Y], (X,), {}, Y),
        ((X, Z, Y), (X, Z), {}, Y),
        ((X,), (X,), {}, X),
        (X, (X,), {}, X),
        ({"image": X, "label": Y}, (), {"image": X}, Y),
        ({"a": X, "b": Z, "targets": Y}, (), {"a": X, "b": Z}, Y),
    ],
)
def test_the_target_is_the_last_item_or_has_its_name(data: Any, arguments: Any, keywords: Any, target: Any) -> None:
    example = split_batch(data)
    assert example.target is target
    assert [id(value) for value in example.arguments] == [id(value) for value in arguments]
    assert {name: id(value) for name, value in example.keywords.items()} == {k: id(v) for k, v in keywords.items()}


def test_a_job_may_name_the_target() -> None:
    data = {"image": X, "label": Y, "mask": Z}
    example = split_batch(data, "mask")
    assert example.target is Z
    assert set(example.keywords) == {"image", "label"}
    with pytest.raises(InputError, match=r"data\.target is 'msk', but batches have no such key: did you mean 'mask'"):
        split_batch(data, "msk")


def test_model_and_loss_receive_the_whole_of_a_dict_without_target() -> None:
    data = {"tokens": X, "mask": Y}
    example = split_batch(data)
    assert set(example.keywords) == set(data)
    assert example.target is data


def test_images_get_the_layout_of_the_plan_and_nothing_else_changes() -> None:
    images = torch.randn(2, 3, 4, 4)
    moved = move_to_device({"image": images, "label": Y, "name": ["a", "b"]}, torch.device("cpu"), channels_last=True)
    assert moved["image"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(moved["image"], images)
    assert torch.equal(moved["label"], Y)
    assert moved["name"] == ["a", "b"]


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_microbatches_hold_every_sample_once_and_none_is_empty(parts: int) -> None:
    data = (torch.arange(4), {"y": torch.arange(4.0), "scale": torch.tensor(3.0)})
    microbatches = split_into_microbatches(data, parts)
    assert len(microbatches) == min(parts, 4)
    assert torch.equal(torch.cat([piece[0] for piece in microbatches]), data[0])
    assert torch.equal(torch.cat([piece[1]["y"] for piece in microbatches]), torch.arange(4.0))
    assert all(float(piece[1]["scale"]) == 3.0 for piece in microbatches)


def test_the_size_of_a_batch_is_that_of_its_first_tensor() -> None:
    assert samples_in({"name": "x", "scale": torch.tensor(1.0), "image": X}) == 4
    with pytest.raises(InputError, match="the batch holds no tensor"):
        samples_in({"name": "x"})


@dataclass
class Pair:
    x: Tensor
    y: Tensor


@pytest.mark.parametrize("batch", [Pair(X, Y), UserDict(x=X, y=Y)])
def test_batches_of_classes_are_counted_and_moved(batch: Any) -> None:
    assert samples_in(batch) == 4
    moved = move_to_device(batch, torch.device("meta"))
    assert type(moved) is type(batch)
    assert all(tensor.is_meta for tensor in tensors_in(moved))


def test_images_and_volumes_are_laid_out_with_channels_last() -> None:
    image, volume = move_to_device(
        (torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 5, 6)), torch.device("cpu"), channels_last=True
    )
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert volume.is_contiguous(memory_format=torch.channels_last_3d)
