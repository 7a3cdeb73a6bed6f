"""The changes of the mutation tests: where they are, that they reach functions that are imported, and which tests run
a line."""

import importlib.util
import os
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

from validation.mutations.__main__ import REPOSITORY, table
from validation.mutations.lines import Cover, LineRecord
from validation.mutations.patch import Functions, can_replace, functions_of, replace
from validation.mutations.sites import ROOMS, Mutant, draw, mutants_of

SOURCE = '''"""About 1 + 1."""

LIMIT = 3


def near(a: int, names: list[str], /, wide: bool = False) -> bool:
    """Whether 1 == 1."""
    if a < 0:
        raise ValueError(f"{a + 1} is not {1 + 2}")
    names.append(
        "near",
    )
    total = (a
             + LIMIT)
    return total > 5 and not wide


def gpu(device: str) -> int:
    if device == "cuda":
        return 7
    return inner()() * 2


def inner():
    outside = 4

    def taken() -> int:
        return outside

    return taken
'''


@pytest.fixture
def module(tmp_path: Path) -> tuple[ModuleType, Path, Functions]:
    path = tmp_path / "changed_by_a_test.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded, path, functions_of(str(tmp_path))


def change(old: str, new: str) -> Mutant:
    (found,) = (one for one in mutants_of(SOURCE, "a.py") if (one.old, one.new.strip()) == (old, new))
    return found


def test_changes_are_in_code_and_keep_the_lines() -> None:
    mutants = mutants_of(SOURCE, "a.py")
    for mutant in mutants:
        changed = mutant.apply(SOURCE)
        compile(changed, "a.py", "exec")
        assert changed != SOURCE
        assert changed.count("\n") == SOURCE.count("\n")
    assert [(one.kind, one.old.split("(")[0], one.new.strip()) for one in mutants] == [
        ("constant", "3", "4"),
        ("flag", "False", "True"),
        ("comparison", "<", "<="),
        ("constant", "0", "1"),
        ("dropped call", "names.append", "pass"),
        ("arithmetic", "+", "-"),
        ("return", "total > 5 and not wide", "None"),
        ("boolean", "and", "or"),
        ("comparison", ">", ">="),
        ("constant", "5", "6"),
        ("boolean", "not wide", "wide"),
        ("comparison", "==", "!="),
        ("return", "inner", "None"),
        ("arithmetic", "*", "+"),
        ("constant", "2", "3"),
        ("constant", "4", "5"),
        ("return", "outside", "None"),
        ("return", "taken", "None"),
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_a_seed_draws_the_same_changes_again(room: str) -> None:
    first = draw(REPOSITORY, room, 20, 3)
    assert first == draw(REPOSITORY, room, 20, 3)
    assert len(set(first)) == 20
    assert first != draw(REPOSITORY, room, 20, 4)
    for mutant in first:
        compile(mutant.apply((REPOSITORY / mutant.file).read_text()), mutant.file, "exec")


def test_changed_code_is_put_into_imported_functions(module: tuple[ModuleType, Path, Functions]) -> None:
    loaded, path, functions = module
    near, mutant = loaded.near, change(">", ">=")
    assert not near(2, [])
    source = mutant.apply(SOURCE)
    assert can_replace(functions, mutant, source, str(path))
    replace(functions, source, str(path))
    assert near(2, [])


def test_what_is_no_part_of_a_function_is_imported_again(module: tuple[ModuleType, Path, Functions]) -> None:
    _, path, functions = module
    for mutant in (change("3", "4"), change("False", "True")):
        assert not can_replace(functions, mutant, mutant.apply(SOURCE), str(path))


def test_lines_are_recorded_by_test_also_in_forked_processes(module: tuple[ModuleType, Path, Functions]) -> None:
    loaded, path, _ = module
    record = LineRecord([path], 2)
    previous = sys.gettrace()
    try:
        record.start()
        loaded.near(1, [])
        record.begin_test(1)
        if (process := os.fork()) == 0:
            loaded.gpu("cpu")
            os._exit(0)
    finally:
        sys.settrace(previous)
    os.waitpid(process, 0)
    first, second = ({int(line.partition(":")[2]) for line in record.lines_of(test, path.parent)} for test in (0, 1))
    assert {6, 8, 10, 15} <= first
    assert {18, 19, 21, 25, 28} <= second
    assert not {9, 20} & (first | second)
    assert not first & second


def test_the_cheapest_tests_of_each_file_come_first() -> None:
    seconds = {"a.py::slow": 9.0, "b.py::one": 2.0, **{f"a.py::{number}": 0.1 * number for number in range(1, 7)}}
    cover = Cover()
    for test, needed in seconds.items():
        cover.add(test, needed, ["m.py:3"] if test != "b.py::one" else ["m.py:3", "m.py:5"])
    assert cover.tests_that_run("m.py", (4, 5)) == ["b.py::one"]
    assert set(cover.tests_that_run("m.py", (1, 2))) == set(seconds)
    of_a = [f"a.py::{number}" for number in range(1, 7)]
    assert cover.cheapest_first(seconds, 8.0) == [*of_a[:4], "b.py::one", *of_a[4:]]
    assert cover.cheapest_first(["a.py::slow"], 8.0) == ["a.py::slow"]


def test_the_table_counts_the_last_try_of_each_change() -> None:
    mutants = draw(REPOSITORY, "collectives", 2, 1)
    rows = [{"room": "collectives", **asdict(mutant), "outcome": "survived"} for mutant in mutants]
    lines = table([*rows, {**rows[0], "outcome": "noticed"}]).splitlines()
    assert "collectives     2 tried,    1 noticed" in lines
    assert [line.split()[0] for line in lines if line.startswith(" ")] == [f"{mutants[1].file}:{mutants[1].line}"]
