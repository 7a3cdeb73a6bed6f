"""Worlds of ranks that many tests share."""

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool, ranks


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with ranks(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def three() -> Iterator[RankPool]:
    with ranks(3) as pool:
        yield pool


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with ranks(4) as pool:
        yield pool
