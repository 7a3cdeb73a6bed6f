"""What the process that runs the tests of a change reports, and how it is watched."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from validation.mutations.lines import LineRecord
from validation.mutations.processes import end, end_descendants, fork_ranks_from_here, has_ended

FACTOR, SPARE_S = 5, 20  # a test is stopped after this many times its time without a change, and this long
_POLL_S = 0.05


def watch(process: int, report: Path, seconds: Mapping[str, float], import_s: float = SPARE_S) -> dict[str, Any]:
    """Waits for a process that runs tests until one fails, or takes far longer than `seconds`."""
    test, since = "", time.time()
    while not has_ended(process):
        time.sleep(_POLL_S)
        last = _last(report)
        if last is not None and "started" in last:
            test, since, import_s = last["test"], last["started"], SPARE_S
        limit_s = FACTOR * seconds.get(test, 0.0) + import_s
        if time.time() - since > limit_s:
            end(process)
            return {"outcome": "noticed", "by": test, "why": f"no end in {limit_s:.0f} s"}
    end_descendants()
    last = _last(report)
    if last is None or "started" in last:
        return {"outcome": "noticed", "by": test, "why": "the process of the tests died"}
    return last


class Reporter:
    """A plugin of pytest that writes which test runs, and ends the process after the first one that fails."""

    def __init__(self, report: Path, forks_ranks: bool = False) -> None:
        self._report, self._forks_ranks = report, forks_ranks

    def pytest_collection_finish(self) -> None:
        if self._forks_ranks:
            fork_ranks_from_here()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        append(self._report, {"test": nodeid, "started": time.time()})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._end(report.nodeid, report.longreprtext)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._end(report.nodeid, report.longreprtext)

    def pytest_sessionfinish(self) -> None:
        append(self._report, {"outcome": "survived"})

    def _end(self, test: str, text: str) -> None:
        lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")] or text.splitlines()[-1:]
        append(self._report, {"outcome": "noticed", "by": test, "why": " ".join(lines[:2])[:200]})
        os._exit(0)


class Timer:
    """A plugin of pytest that writes what became of each test, and tells which one runs."""

    def __init__(self, outcomes: Path, numbers: Mapping[str, int], record: LineRecord) -> None:
        self._outcomes, self._numbers, self._record = outcomes, numbers, record
        self._seconds, self._outcome = 0.0, "passed"

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._record.begin_test(self._numbers[nodeid])
        self._seconds, self._outcome = 0.0, "passed"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if not report.passed:
            self._outcome = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        append(self._outcomes, [nodeid, self._outcome, round(self._seconds, 3)])


def append(path: Path, row: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def rows_of(path: Path) -> Iterator[Any]:
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def _last(path: Path) -> Any:
    """Returns the last row that is written to its end."""
    text = path.read_text() if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    return json.loads(lines[-1]) if lines else None
