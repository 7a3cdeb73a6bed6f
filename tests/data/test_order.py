import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.order import batches_per_epoch, derive_seed, permutation


def test_seeds_and_orders_never_change() -> None:
    """A run saved by an older version, or on another machine, goes on with the same samples."""
    assert derive_seed(0) == 3581690635855307741
    assert derive_seed(3, "order", 1) == 8398916383982505669
    assert permutation(0, 0, 8).tolist() == [0, 3, 7, 4, 2, 5, 6, 1]


def test_each_use_of_a_seed_gets_another_seed() -> None:
    uses: list[tuple[int | str, ...]] = [(), (1,), ("1",), ("a", 12), ("a1", 2), ("a", 1, 2), (1, 2), (12,)]
    seeds = [derive_seed(0, *use) for use in uses] + [derive_seed(1)]
    assert len(set(seeds)) == len(uses) + 1
    assert all(0 <= seed < 2**63 for seed in seeds)


@given(st.integers(0, 2**40), st.integers(0, 1000), st.integers(1, 200))
def test_an_epoch_visits_every_sample_once(seed: int, epoch: int, size: int) -> None:
    order = permutation(seed, epoch, size)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(permutation(seed, epoch, 50)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@given(st.integers(1, 100), st.integers(1, 40), st.booleans())
def test_batches_cover_the_epoch(size: int, batch: int, drop_last: bool) -> None:
    batches = batches_per_epoch(size, batch, drop_last)
    assert batches * batch <= size if drop_last else (batches - 1) * batch < size <= batches * batch
