"""What tests cost: `pytest --costs 20` prints the seconds of processors that folders, files, fixtures, and the 20 most
expensive tests have used, with all processes that they started. Unlike the time on a clock, they hardly depend on what
else the machine does.

    cost of a test = used after it - used before it
    used           = the sum over this process and its descendants of their own time and that of the children
                     that they have waited for                                         (`used_s`)

Of the setup of a fixture that serves several tests, the costs are the fixture's, not the first test's.

`pytest --keep-costs FILE` writes the seconds of each test into a file (measured.py)."""

import os
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from tests.selection.measured import keep_s

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_ROWS = 12  # of the tables of files and fixtures


class Costs:
    """A plugin that measures each test and each shared fixture, and prints tables at the end."""

    def __init__(self, rows: int | None, file: Path | None = None) -> None:
        self.rows, self.file = rows, file
        self.tests: dict[str, float] = defaultdict(float)
        self.fixtures: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        shared, before = sum(self.fixtures.values()), used_s()
        result = yield
        self.tests[item.nodeid] += used_s() - before - (sum(self.fixtures.values()) - shared)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        name, shared, before = f"{fixturedef.baseid}::{fixturedef.argname}", sum(self.fixtures.values()), used_s()
        result = yield
        self.fixtures[name] += used_s() - before - (sum(self.fixtures.values()) - shared)
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A worker of pytest-xdist sends its costs to the process that started it."""
        if (sent := getattr(session.config, "workeroutput", None)) is not None:
            sent["costs"] = [dict(self.tests), dict(self.fixtures)]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Adds those of a worker that has ended; one that was killed has sent none."""
        received = getattr(node, "workeroutput", {}).get("costs", [])
        for costs, of_worker in zip((self.tests, self.fixtures), received, strict=False):
            for name, used in of_worker.items():
                costs[name] += used

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.file is not None:
            keep_s(self.file, self.tests)
        if self.rows is None:
            return
        terminalreporter.section("seconds of processors")
        for line in cost_table(self.tests, self.fixtures, self.rows):
            terminalreporter.write_line(line)


def used_s() -> float:
    """Returns the seconds of processors that this process and its descendants have used."""
    times = {int(entry.name): _read(entry / "stat") for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    children: dict[int, list[int]] = {}
    for process, (parent, _) in times.items():
        children.setdefault(parent, []).append(process)
    used, waiting = 0, [os.getpid()]
    while waiting:
        process = waiting.pop()
        used += times[process][1]
        waiting += children.get(process, [])
    return used / _TICKS_PER_S


def _read(file: Path) -> tuple[int, int]:
    """Returns the parent of a process and the ticks that it has used; 0 if it has ended by now."""
    try:
        fields = file.read_text().rpartition(")")[2].split()
    except OSError:
        return 0, 0
    return int(fields[1]), sum(map(int, fields[11:15]))


def cost_table(tests: Mapping[str, float], fixtures: Mapping[str, float], rows: int) -> Iterator[str]:
    """Yields the lines of the tables by folder, file, fixture and test, the most expensive first."""
    folders: dict[str, float] = defaultdict(float)
    files: dict[str, float] = defaultdict(float)
    for name, used in (*tests.items(), *fixtures.items()):
        path = Path(name.partition("::")[0])
        files[path.as_posix()] += used
        folders["/".join(path.parts[:3] if path.suffix != ".py" else path.parent.parts[:3])] += used
    yield f"{sum(folders.values()):8.1f} s in {len(tests)} tests"
    tables = (
        ("folders", folders, None),
        ("files", files, _ROWS),
        ("fixtures", fixtures, _ROWS),
        ("tests", tests, rows),
    )
    for title, table, most in tables:
        yield f"{title}:"
        for name, used in sorted(table.items(), key=itemgetter(1), reverse=True)[:most]:
            yield f"{used:8.2f} s {name}"
