"""Pools of ranks that many tests share, and the order and shards of tests."""

import atexit
import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from hypothesis import settings

from meshwright.launch.local import fork_server
from tests.ranks import RankPool, ranks

settings.register_profile("meshwright", deadline=None)  # no test fails because a core is busy
settings.load_profile("meshwright")
_STATE = tempfile.TemporaryDirectory(prefix="meshwright-tests-")
os.environ["XDG_STATE_HOME"] = _STATE.name  # the key that signs the runs of tests is not that of the user
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # each of several workers has a core


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


@pytest.fixture
def shared_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets commands that a test runs in its own process fork their ranks from a server that all tests share, because
    every new server imports torch again."""
    monkeypatch.setattr(fork_server, "preloaded", lambda module: nullcontext())
    monkeypatch.setattr(fork_server, "_preloaded", _started_fork_server())


@cache
def _started_fork_server() -> fork_server.ForkServer:
    server = fork_server.ForkServer("meshwright.train.rank")
    atexit.register(server.close)
    return server


@pytest.fixture
def used_up_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the system notice only when a file is synchronized that the quota is used up, as network disks do."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", fail)


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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts long files first, and leaves only the tests of one shard, of those that `-m` has left."""

    def start_order(item: pytest.Item) -> int:
        return next((number for number, name in enumerate(_LONG) if item.path.as_posix().endswith(name)), len(_LONG))

    items.sort(key=start_order)
    if shard := config.getoption("--shard"):
        items[:] = _tests_of_shard(items, shard)


def _tests_of_shard(items: list[pytest.Item], shard: str) -> list[pytest.Item]:
    number, count = (int(part) for part in shard.split("/"))
    if not 1 <= number <= count:
        raise pytest.UsageError(f"--shard {shard}: write I/N with 1 <= I <= N")
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path.as_posix(), []).append(item)
    selected = {
        id(item)
        for first, tests in enumerate(by_file.values())  # files with few tests begin at different shards
        for position, item in enumerate(tests)
        if (first + position * count // len(tests)) % count == number - 1
    }
    return [item for item in items if id(item) in selected]
