"""The best whole shares of a batch, against all divisions of small ones."""

from collections.abc import Callable, Iterator
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.unequal.shares import ShareGroup, best_shares

Kinds = list[tuple[int, float, float, int]]  # ranks, seconds without a sample, seconds of a sample, samples that fit


def line(start_s: float, sample_s: float) -> Callable[[int], float]:
    # Wider steps than a sample, as products on a GPU have them.
    return lambda samples: start_s + sample_s * (samples + samples // 4)


def groups_of(kinds: Kinds) -> list[ShareGroup]:
    return [
        ShareGroup(ranks, line(start_s, sample_s), lambda samples, most=most: samples <= most)  # type: ignore[misc]
        for ranks, start_s, sample_s, most in kinds
    ]


def all_longest_s(total: int, kinds: Kinds, fewest: int) -> Iterator[float]:
    """The longest time of every division of the samples, by the most samples of a rank of each kind."""
    for shares in product(*(range(fewest, min(total, most) + 1) for *_, most in kinds)):
        least = sum(share + (ranks - 1) * fewest for (ranks, *_), share in zip(kinds, shares, strict=True))
        most = sum(ranks * share for (ranks, *_), share in zip(kinds, shares, strict=True))
        if least <= total <= most:
            yield max(line(start, each)(share) for (_, start, each, _), share in zip(kinds, shares, strict=True))


kind = st.tuples(st.integers(1, 4), st.floats(0, 5), st.floats(0.01, 3), st.integers(1, 30))


@settings(deadline=None, max_examples=150)
@given(st.lists(kind, min_size=1, max_size=3), st.integers(1, 40), st.integers(1, 3))
def test_no_other_division_is_faster(kinds: Kinds, total: int, fewest: int) -> None:
    shares = best_shares(total, groups_of(kinds), fewest)
    possible = sorted(all_longest_s(total, kinds, fewest))
    if shares is None:
        assert not possible
        return
    assert sum(map(sum, shares)) == total
    assert [len(of_group) for of_group in shares] == [ranks for ranks, *_ in kinds]
    for of_group, (_, _, _, most) in zip(shares, kinds, strict=True):
        assert min(of_group) >= fewest
        assert max(of_group) <= min(most, min(of_group) + 1)
    longest = max(line(start, each)(max(s)) for s, (_, start, each, _) in zip(shares, kinds, strict=True))
    assert longest == possible[0]


def test_few_times_are_predicted_for_large_batches() -> None:
    asked: list[int] = []

    def seconds(samples: int) -> float:
        asked.append(samples)
        return 0.01 + 1e-4 * samples

    groups = [ShareGroup(512, seconds, lambda _: True), ShareGroup(512, lambda s: 2.6 * seconds(s), lambda _: True)]
    shares = best_shares(1_000_000, groups)
    assert shares is not None
    assert sum(map(sum, shares)) == 1_000_000
    assert len(asked) < 40


def test_ranks_that_are_alike_get_even_shares() -> None:
    assert best_shares(7, [ShareGroup(3, lambda samples: float(samples), lambda _: True)]) == [[3, 2, 2]]
