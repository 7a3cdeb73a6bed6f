"""The seconds of processors that tests use are counted, with those of the processes that they start."""

import json
import os

import pytest

from tests.forking.environment import REPOSITORY
from tests.forking.forked import fork
from tests.selection.costs import cost_table, used_s

pytest_plugins = ["pytester"]
BUSY_S = 0.3

CONFTEST = """
import pytest
from tests.selection.costs import Costs

def pytest_configure(config):
    config.pluginmanager.register(Costs(2))
"""
IMPORTS = f"""
import pytest, sys
from pathlib import Path
sys.path.insert(0, {str(REPOSITORY)!r})
"""
FILE = f"""
import pytest, time

def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

@pytest.fixture(scope="module")
def shared():
    work({BUSY_S})

def test_a(shared):
    pass

def test_b(shared):
    work({BUSY_S} * 2)

def test_c():
    pass
"""


def work_and_stay() -> None:
    """Stays until its standard input ends."""
    end = os.times().user + BUSY_S
    while os.times().user < end:
        pass
    os.read(0, 1)


def test_other_processes_count_before_and_after_their_end() -> None:
    before = used_s()
    read_end, write_end = os.pipe()
    process = fork("tests.selection.test_costs:work_and_stay", stdin=read_end)
    os.close(read_end)
    while used_s() - before < BUSY_S * 0.9:
        assert process.poll() is None, "it ended before its standard input did"
    running = process.poll() is None
    os.close(write_end)
    process.wait()
    assert running
    assert used_s() - before >= BUSY_S * 0.9


def test_a_shared_fixture_is_not_charged_to_the_test_that_is_first_to_use_it(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_costs_of=FILE)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:timeout")
    lines = [line.split(" s ") for line in result.outlines if " s test_costs_of" in line]
    costs = {name: float(seconds) for seconds, name in lines}
    assert costs["test_costs_of.py::shared"] >= BUSY_S * 0.9
    assert costs["test_costs_of.py::test_b"] >= BUSY_S * 2 * 0.9
    assert costs.get("test_costs_of.py::test_a", 0.0) < BUSY_S / 2
    assert len([name for name in costs if "::test_" in name]) == 2


def test_workers_send_their_costs(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.replace("Costs(2)", "Costs(2, Path('kept.json'))").replace("import pytest", IMPORTS))
    pytester.makepyfile(test_costs_of=FILE)
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n", "1")
    kept = json.loads((pytester.path / "kept.json").read_text())
    assert list(kept) == ["test_costs_of.py"]
    assert kept["test_costs_of.py"]["test_b"] >= BUSY_S * 2 * 0.9


def test_tables_are_sorted_and_summed_by_folder() -> None:
    tests = {"tests/a/b/c/test_x.py::one": 1.0, "tests/a/b/d/test_y.py::two": 2.5, "tests/test_z.py::three": 3.0}
    assert [line.split() for line in cost_table(tests, {"tests/a/conftest.py::made": 0.5}, 1)] == [
        line.split()
        for line in """   7.0 s in 3 tests
folders:
    3.50 s tests/a/b
    3.00 s tests
    0.50 s tests/a
files:
    3.00 s tests/test_z.py
    2.50 s tests/a/b/d/test_y.py
    1.00 s tests/a/b/c/test_x.py
    0.50 s tests/a/conftest.py
fixtures:
    0.50 s tests/a/conftest.py::made
tests:
    3.00 s tests/test_z.py::three""".splitlines()
    ]
