"""Pools of ranks that many tests share, and the order and shards of tests."""

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


# Files whose few tests start long trainings. They begin first, so that no core waits for them at the end.
_LONG = (
    "train/servers/test_faults.py",
    "train/runs/test_faults.py",
    "proof/test_command.py",
    "train/test_launched.py",
    "train/runs/test_default_job.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", help="run the I-th of N equal parts of every file's tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def start_order(item: pytest.Item) -> int:
        return next((number for number, name in enumerate(_LONG) if item.path.as_posix().endswith(name)), len(_LONG))

    items.sort(key=start_order)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Leaves only the tests of one shard. By then `-m` has left only the tests that were asked for."""
    shard = session.config.getoption("--shard")
    if not shard:
        return
    number, count = (int(part) for part in shard.split("/"))
    if not 1 <= number <= count:
        raise pytest.UsageError(f"--shard {shard}: write I/N with 1 <= I <= N")
    by_file: dict[str, list[pytest.Item]] = {}
    for item in session.items:
        by_file.setdefault(item.path.as_posix(), []).append(item)
    selected = {
        id(item)
        for first, tests in enumerate(by_file.values())  # files with few tests begin at different shards
        for position, item in enumerate(tests)
        if (first + position * count // len(tests)) % count == number - 1
    }
    session.items[:] = [item for item in session.items if id(item) in selected]
