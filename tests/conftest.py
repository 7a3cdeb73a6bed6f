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


# Files whose few tests start trainings of their own: begun last, one core would wait for them.
_LONG = (
    "train/test_servers_faults.py",
    "train/test_faults.py",
    "proof/test_command.py",
    "train/test_joined.py",
    "train/test_default_job.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return next((number for number, name in enumerate(_LONG) if item.path.as_posix().endswith(name)), len(_LONG))

    items.sort(key=place)
