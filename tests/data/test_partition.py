from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.partition import microbatches, parts, share

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
    of_ranks = [parts(count, rank, ranks, accumulation) for rank in range(ranks)]
    assert len({len(own) for own in of_ranks}) == 1
    assert all(of_ranks[0])
    assert [position for own in of_ranks for piece in own for position in piece] == list(range(count))
