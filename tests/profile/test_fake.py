"""Several threads may trace models at the same time."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from meshwright.profile.fake import one_sequence_per_row


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
