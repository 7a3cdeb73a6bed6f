import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.evenness import labels_of, told_of_parts
from meshwright.data.order import permutation
from meshwright.data.partition import ByBatch, ByPart, Partition, even_shares, microbatches, parts, share
from meshwright.errors import InputError

counts = st.integers(0, 100)
some = st.integers(1, 9)


@given(counts, some)
def test_shares_are_contiguous_and_even(count: int, ranks: int) -> None:
    shares = [share(count, rank, ranks) for rank in range(ranks)]
    assert [position for own in shares for position in own] == list(range(count))
    sizes = [len(own) for own in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(counts, counts, some)
def test_microbatches_are_even_and_none_is_empty(start: int, count: int, accumulation: int) -> None:
    own = range(start, start + count)
    pieces = microbatches(own, accumulation)
    assert [position for piece in pieces for position in piece] == list(own)
    assert len(pieces) == min(count, accumulation)
    sizes = [len(piece) for piece in pieces]
    assert not sizes or (min(sizes) > 0 and max(sizes) - min(sizes) <= 1)


@given(st.integers(1, 100), some, some)
def test_every_rank_has_as_many_parts(count: int, ranks: int, accumulation: int) -> None:
    shares = even_shares(range(count), ranks)
    of_ranks = [parts(shares, rank, accumulation) for rank in range(ranks)]
    assert len({len(own) for own in of_ranks}) == 1
    assert all(of_ranks[0])
    assert [position for own in of_ranks for piece in own for position in piece] == list(range(count))


def _visited(division: Partition, epoch: int) -> list[list[list[int]]]:
    """Samples by batch and rank."""
    order = division.order(epoch)
    return [
        [order[own.start : own.stop].tolist() for own in division.shares(index)] for index in range(division.batches)
    ]


@given(st.integers(1, 200), st.integers(1, 40), some, st.integers(0, 3))
def test_by_batch_every_sample_comes_once_in_the_order_of_one_rank(
    size: int, batch: int, ranks: int, epoch: int
) -> None:
    visited = _visited(ByBatch(size, batch, ranks, 7), epoch)
    whole = [sample for of_batch in visited for own in of_batch for sample in own]
    assert whole == permutation(7, epoch, size).tolist()
    assert all(sum(map(len, of_batch)) == batch for of_batch in visited[:-1])


@given(st.integers(1, 200), st.integers(1, 40), some, some, st.integers(0, 3))
def test_by_sample_ranks_keep_to_their_parts_and_end_together(
    size: int, batch: int, ranks: int, more: int, epoch: int
) -> None:
    number = ranks + more - 1
    if number > size or number > batch:
        with pytest.raises(InputError, match="parts"):
            ByPart(size, batch, ranks, 7, number)
        return
    division = ByPart(size, batch, ranks, 7, number)
    visited = _visited(division, epoch)
    assert sorted(sample for of_batch in visited for own in of_batch for sample in own) == list(range(size))
    assert all(0 < sum(map(len, of_batch)) <= batch for of_batch in visited)
    begin = 0
    for rank, owned in enumerate(even_shares(range(number), ranks)):
        end = begin + sum(division.sizes[part] for part in owned)
        assert {sample for of_batch in visited for sample in of_batch[rank]} == set(range(begin, end))
        assert begin <= division.spare(division.order(epoch), 0, rank) < end
        begin = end
    # Which batch a sample comes in, no rank changes.
    alone = [own for (own,) in _visited(ByPart(size, batch, 1, 7, number), epoch)]
    assert [[sample for own in of_batch for sample in own] for of_batch in visited] == alone


def test_parts_are_shuffled_in_every_epoch() -> None:
    division = ByPart(64, 8, 2, 0, 2)
    assert division.order(0).tolist() != division.order(1).tolist() != np.arange(64).tolist()


def test_skewed_labels_are_told() -> None:
    division = ByPart(1000, 100, 2, 0, 2)
    sorted_labels = [0] * 500 + [1] * 500
    even = [0, 1] * 500
    assert division.skew(sorted_labels)[0] > 0.4
    assert division.skew(even)[0] == 0
    (sizes, warning) = told_of_parts(division, sorted_labels)
    assert "2 parts of 500 to 500 samples (0.0% apart), 10 batches an epoch of at most 100" in sizes
    assert "skewed" in warning
    assert len(told_of_parts(division, even)) == 1
    assert "33.3% apart" in told_of_parts(ByPart(5, 5, 2, 0, 2), None)[0]


def test_labels_that_are_known_without_reading() -> None:
    class Known(list[int]):
        targets = (3, 4)

    assert labels_of(Known([0, 0])) == [3, 4]
    assert labels_of(Known([0])) is None
    assert labels_of([1, 2]) is None
