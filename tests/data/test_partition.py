import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.order import permutation
from meshwright.data.part_balance import describe_parts, labels_of
from meshwright.data.partition import (
    BatchPartition,
    Partition,
    PartPartition,
    even_share,
    even_shares,
    microbatches,
    padded_microbatches,
    proportional_shares,
)
from meshwright.errors import InputError

counts = st.integers(0, 100)
some = st.integers(1, 9)


@given(counts, some)
def test_shares_are_contiguous_and_even(count: int, ranks: int) -> None:
    shares = [even_share(count, rank, ranks) for rank in range(ranks)]
    assert [position for share in shares for position in share] == list(range(count))
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(counts, st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_proportional_shares_are_contiguous_and_their_exact_sizes_up_to_rounding(
    count: int, samples: list[int]
) -> None:
    shares = proportional_shares(range(5, 5 + count), samples)
    assert [position for share in shares for position in share] == list(range(5, 5 + count))
    assert all(abs(len(share) - count * part / sum(samples)) < 1 for share, part in zip(shares, samples, strict=True))
    whole = proportional_shares(range(3 * sum(samples)), samples)
    assert [len(share) for share in whole] == [3 * part for part in samples]


@given(counts, some, some)
def test_equal_proportions_are_even_shares(count: int, ranks: int, samples: int) -> None:
    assert proportional_shares(range(count), [samples] * ranks) == even_shares(range(count), ranks)


@given(counts, counts, some)
def test_microbatches_are_even_and_none_is_empty(start: int, count: int, accumulation: int) -> None:
    share = range(start, start + count)
    cut = microbatches(share, accumulation)
    assert [position for microbatch in cut for position in microbatch] == list(share)
    assert len(cut) == min(count, accumulation)
    sizes = [len(microbatch) for microbatch in cut]
    assert not sizes or (min(sizes) > 0 and max(sizes) - min(sizes) <= 1)


@given(st.integers(1, 100), some, some)
def test_every_rank_has_the_same_number_of_microbatches(count: int, ranks: int, accumulation: int) -> None:
    shares = even_shares(range(count), ranks)
    of_ranks = [padded_microbatches(shares, rank, accumulation) for rank in range(ranks)]
    assert len({len(of_rank) for of_rank in of_ranks}) == 1
    assert all(of_ranks[0])
    positions = [position for of_rank in of_ranks for microbatch in of_rank for position in microbatch]
    assert positions == list(range(count))


def _samples_by_batch_and_rank(partition: Partition, epoch: int) -> list[list[list[int]]]:
    """The sample indices of each rank in each batch of an epoch."""
    order = partition.order(epoch)
    return [
        [order[share.start : share.stop].tolist() for share in partition.shares(index)]
        for index in range(partition.batches)
    ]


@given(st.integers(1, 200), st.integers(1, 40), some, st.integers(0, 3))
def test_by_batch_every_sample_comes_once_in_the_same_order_for_any_number_of_ranks(
    size: int, batch: int, ranks: int, epoch: int
) -> None:
    samples = _samples_by_batch_and_rank(BatchPartition(size, batch, ranks, 7), epoch)
    whole = [sample for of_batch in samples for share in of_batch for sample in share]
    assert whole == permutation(7, epoch, size).tolist()
    assert all(sum(map(len, of_batch)) == batch for of_batch in samples[:-1])


@given(st.integers(1, 200), st.integers(1, 40), some, some, st.integers(0, 3))
def test_by_sample_ranks_keep_to_their_parts_and_end_together(
    size: int, batch: int, ranks: int, more: int, epoch: int
) -> None:
    number = ranks + more - 1
    if number > size or number > batch:
        with pytest.raises(InputError, match="parts"):
            PartPartition(size, batch, ranks, 7, number)
        return
    partition = PartPartition(size, batch, ranks, 7, number)
    samples = _samples_by_batch_and_rank(partition, epoch)
    assert sorted(sample for of_batch in samples for share in of_batch for sample in share) == list(range(size))
    assert all(0 < sum(map(len, of_batch)) <= batch for of_batch in samples)
    begin = 0
    for rank, parts_of_rank in enumerate(even_shares(range(number), ranks)):
        end = begin + sum(partition.sizes[part] for part in parts_of_rank)
        assert {sample for of_batch in samples for sample in of_batch[rank]} == set(range(begin, end))
        assert begin <= partition.borrowed_sample(partition.order(epoch), 0, rank) < end
        begin = end
    # The number of ranks does not change which batch a sample comes in.
    alone = [share for (share,) in _samples_by_batch_and_rank(PartPartition(size, batch, 1, 7, number), epoch)]
    assert [[sample for share in of_batch for sample in share] for of_batch in samples] == alone


def test_parts_are_shuffled_in_every_epoch() -> None:
    partition = PartPartition(64, 8, 2, 0, 2)
    assert partition.order(0).tolist() != partition.order(1).tolist() != np.arange(64).tolist()


def test_users_are_warned_of_skewed_labels() -> None:
    partition = PartPartition(1000, 100, 2, 0, 2)
    sorted_labels = [0] * 500 + [1] * 500
    even = [0, 1] * 500
    assert partition.skew(sorted_labels)[0] > 0.4
    assert partition.skew(even)[0] == 0
    (sizes, warning) = describe_parts(partition, sorted_labels)
    assert "2 parts of 500 to 500 samples (sizes differ by 0.0%), 10 batches per epoch, of at most 100 samples" in sizes
    assert "skewed" in warning
    assert len(describe_parts(partition, even)) == 1
    assert "sizes differ by 33.3%" in describe_parts(PartPartition(5, 5, 2, 0, 2), None)[0]


def test_labels_are_found_without_reading_samples() -> None:
    class WithTargets(list[int]):
        targets = (3, 4)

    assert labels_of(WithTargets([0, 0])) == [3, 4]
    assert labels_of(WithTargets([0])) is None
    assert labels_of([1, 2]) is None
