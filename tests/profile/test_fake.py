"""Fake copies of models and batches. Several threads may trace models at the same time."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from meshwright.profile.fake import batch_size, fake_batch, fake_model, one_sequence_per_row
from meshwright.profile.torch_private import FakeTensor, FakeTensorMode


def test_threads_that_trace_at_the_same_time_leave_the_transformers_library_as_it_was() -> None:
    masks = pytest.importorskip("transformers.masking_utils")
    find_packed = masks.find_packed_sequence_indices
    packed = torch.arange(4).repeat(1, 2)  # two sequences in a row
    sample = torch.zeros(1, 8)
    first, second = one_sequence_per_row(sample), one_sequence_per_row(sample)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        one.submit(first.__enter__).result()
        other.submit(second.__enter__).result()
        assert one.submit(masks.find_packed_sequence_indices, packed).result() is None
        assert masks.find_packed_sequence_indices(packed) is not None, "this thread traces nothing"
        one.submit(first.__exit__, None, None, None).result()
        assert other.submit(masks.find_packed_sequence_indices, packed).result() is None
        other.submit(second.__exit__, None, None, None).result()
    assert masks.find_packed_sequence_indices is find_packed


def pictures(*shapes: tuple[int, int]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Pictures of different sizes with their boxes, as detectors read them."""
    return [torch.rand(3, *shape) for shape in shapes], [{"boxes": torch.rand(1 + i, 4)} for i in range(len(shapes))]


def test_samples_in_lists_keep_their_shapes() -> None:
    sample = pictures((8, 6), (4, 10))
    assert batch_size(sample) == 2, "the samples, not the colors"
    images, targets = fake_batch(sample, 3, FakeTensorMode())
    assert [tuple(image.shape) for image in images] == [(3, 8, 6), (3, 4, 10), (3, 8, 6)]
    assert [tuple(target["boxes"].shape) for target in targets] == [(1, 4), (2, 4), (1, 4)]


def test_a_model_that_keeps_the_result_of_an_operator_is_copied() -> None:
    model = nn.utils.weight_norm(nn.Linear(4, 2))  # the older function, which many models still call
    mode = FakeTensorMode()
    fake = fake_model(model, mode)
    with mode:
        assert fake(torch.empty(3, 4)).shape == (3, 2)
    assert not isinstance(model.weight, FakeTensor)
