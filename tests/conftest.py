"""Pools of ranks that many tests share, and the order, groups and parts of tests."""

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from meshwright.errors import InputError
from meshwright.processes.local import fork_server
from meshwright.report.figures import find_browser
from tests.auto.machines import store_measurement
from tests.forking.environment import IS_WORKER, set_variables
from tests.forking.forked import spawn_by_forking
from tests.forking.leftovers import adopt_orphans, leaving_nothing
from tests.ranks import RankPool, enable_onednn, ranks
from tests.selection.costs import Costs
from tests.selection.cover import cover_table
from tests.selection.groups import GROUPS, items_of_group
from tests.selection.parts import Part
from tests.selection.skips import NoOtherSkips
from validation.speed.step_digest import table_state

settings.register_profile("meshwright", deadline=None)  # no test fails because a core is busy
settings.load_profile("meshwright")
set_variables()
fork_server._spawn = spawn_by_forking
adopt_orphans()
if IS_WORKER:
    torch.set_num_threads(1)  # each of several workers has a core
else:
    store_measurement()


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
def nothing_left(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests that kill or stop processes: checks afterwards that nothing of them is left."""
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    with leaving_nothing(temporary):
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_left_at_the_end() -> Iterator[None]:
    """Checks after all tests that no process and no segment of theirs is left."""
    with leaving_nothing():
        yield


@pytest.fixture
def used_up_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the system notice only when a file is synchronized that the quota is used up, as network disks do."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", fail)


@pytest.fixture(autouse=True)
def same_kernels() -> None:
    enable_onednn()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One browser for all tests of a process, in which Playwright starts only once. Tests that need it are skipped
    where there is no Chrome or Chromium."""
    try:
        program = find_browser()
    except InputError as error:
        pytest.skip(str(error))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


# Files that take longest. They begin first, so that no core waits for them at the end.
_LONG = (
    "proof/test_matrix.py",
    "compat/transformers/test_checkpoints.py",
    "planner/test_search.py",
    "compat/lightning/test_trainer.py",
    "compat/transformers/test_trainer.py",
    "train/runs/test_faults.py",
    "train/test_launched.py",
    "train/stalls/test_stalls.py",
    "documentation/test_blocks.py",
    "proof/causes/test_causes.py",
    "planner/questions/test_questions.py",
    "processes/test_notebook.py",
    "report/plans/test_page.py",
    "calibrate/test_probe.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--group", choices=GROUPS, help="run only the tests of one target of the Makefile (tests/selection/groups.py)"
    )
    parser.addoption("--costs", type=int, metavar="N", help="print what tests cost, and the N most expensive ones")
    parser.addoption("--keep-costs", type=Path, metavar="FILE", help="write what each test costs into a JSON file")
    parser.addoption(
        "--no-other-skips",
        action="store_true",
        help="fail if a test is skipped that can run (tests/selection/skips.py)",
    )
    parser.addoption("--part", type=int, metavar="N", help="run part N of the soak (tests/selection/parts.py)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-other-skips") and not IS_WORKER:
        config.pluginmanager.register(NoOtherSkips())
    rows, file = config.getoption("--costs"), config.getoption("--keep-costs")
    if rows is not None or file is not None:
        config.pluginmanager.register(Costs(rows, file))
    if (part := config.getoption("--part")) is not None:
        config.pluginmanager.register(Part(part))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts long files first, and leaves only the tests of one group, of those that `-m` has left."""

    def start_order(item: pytest.Item) -> int:
        return next((number for number, name in enumerate(_LONG) if item.path.as_posix().endswith(name)), len(_LONG))

    items.sort(key=start_order)
    if group := config.getoption("--group"):
        items[:] = items_of_group(items, group)


def pytest_collection_finish() -> None:
    """Lets garbage collections leave out what the tests import, which takes longer to look through than most tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says whether the table of the sweep was measured with the step's files as they are, what was run of a group or a
    part, and what was skipped and why."""
    if line := table_state():
        terminalreporter.write_line(line, yellow=True)
    if {terminalreporter.config.getoption(name) for name in ("--group", "--part")} != {None}:
        reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("skipped")]
        terminalreporter.section("what was run")
        for row in cover_table(reports):
            terminalreporter.write_line(row)
