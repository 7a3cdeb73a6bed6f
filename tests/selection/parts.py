"""The parts of the soak. Each takes at most ten minutes of two cores, and `.ci/run` runs another one for each commit.

    seconds of a test = what it used when it was last measured (measured.py, in seconds of processors); otherwise the
                        median of the same function's cases, or the mean of the soak                 (`expected_s`)
    number of parts   = the seconds of all tests / PART_S, rounded up                                  (`parts`)

`pytest -m soak --part N` runs part N modulo their number, for example with the number of commits as N."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any

import pytest

from tests.selection.measured import measured_s

PART_S = 900.0  # of processors; two cores have 1200 in ten minutes, and are busy for at least 75% of the time
UNKNOWN_S = 10.0  # the mean of the soak: 2,500 tests took 3.5 hours of two cores
UNIT_S = 60.0  # cases of one function stay together, and share what they have traced or started, up to this


class Part:
    """A plugin that leaves only the tests of one part, and says at the end which one it was."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.line = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        names, measured = [item.nodeid for item in items], measured_s()
        dealt = parts(names, measured)
        number = self.number % len(dealt)
        chosen = frozenset(dealt[number])
        items[:] = [item for item in items if item.nodeid in chosen]
        seconds = sum(expected_s(chosen, measured).values())
        self.line = f"part {number} of 0 to {len(dealt) - 1}: {seconds:.0f} s of processors expected"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A worker of pytest-xdist sends its line to the process that started it, which collects no tests."""
        if (sent := getattr(session.config, "workeroutput", None)) is not None:
            sent["part"] = self.line

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.line = getattr(node, "workeroutput", {}).get("part", self.line)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(self.line)


def expected_s(names: Iterable[str], measured: Mapping[str, float]) -> dict[str, float]:
    """The seconds of each test, by its name."""
    cases: dict[str, list[float]] = {}
    for name, seconds in measured.items():
        cases.setdefault(name.partition("[")[0], []).append(seconds)
    medians = {function: median(seconds) for function, seconds in cases.items()}
    return {name: measured.get(name) or medians.get(name.partition("[")[0], UNKNOWN_S) for name in names}


def parts(names: Sequence[str], measured: Mapping[str, float], part_s: float = PART_S) -> list[list[str]]:
    """Deals the tests out to parts that take about as long as each other. The longest go first, each to the part that
    has least so far, so a large matrix has cases in every part."""
    seconds = expected_s(names, measured)
    units = sorted(_units(names, seconds), key=lambda unit: sum(map(seconds.__getitem__, unit)), reverse=True)
    dealt: list[list[str]] = [[] for _ in range(max(1, math.ceil(sum(seconds.values()) / part_s)))]
    taken = [0.0] * len(dealt)
    for unit in units:
        least = taken.index(min(taken))
        dealt[least] += unit
        taken[least] += sum(map(seconds.__getitem__, unit))
    return dealt


def _units(names: Sequence[str], seconds: Mapping[str, float]) -> Iterable[list[str]]:
    """Neighbouring cases of one function, until they take `UNIT_S`."""
    for _, cases in groupby(names, lambda name: name.partition("[")[0]):
        unit: list[str] = []
        for case in cases:
            if unit and sum(map(seconds.__getitem__, unit)) + seconds[case] > UNIT_S:
                yield unit
                unit = []
            unit.append(case)
        yield unit
