"""Every test belongs to one target of the Makefile, and `make test` trains through every other library once."""

from typing import Any, Literal

import pytest

from tests.selection.groups import FOLDERS, GROUPS, TESTS, cover_table, is_in_group

DOORS = [path for path in sorted((TESTS / "compat").iterdir()) if (path / "__init__.py").exists()]


def test_the_folders_of_the_groups_exist() -> None:
    assert all((TESTS / folder).is_dir() for folders in FOLDERS.values() for folder in folders)


def test_every_group_has_a_target_that_ci_runs() -> None:
    makefile, ci = ((TESTS.parent / name).read_text() for name in ("Makefile", ".ci/run"))
    targets = next(line for line in makefile.splitlines() if line.startswith("GROUPS := ")).split()[2:]
    assert ["core", *targets] == list(GROUPS)
    assert all(f"test-{target}" in ci for target in targets)


def test_the_core_has_a_test_of_each_door() -> None:
    for door in DOORS:
        assert any("@pytest.mark.door" in file.read_text() for file in door.glob("test_*.py")), door.name


def test_a_test_is_in_one_group_and_one_of_a_door_in_the_core_too(request: pytest.FixtureRequest) -> None:
    """Of this test, put into other folders."""
    item = request.node
    for path, own in {
        "blocks/test_a.py": "core",
        "validation/test_a.py": "core",
        "validation/runs/models/test_a.py": "validation",
        "compat/ray/test_a.py": "compat",
        "documentation/test_a.py": "docs",
    }.items():
        item.path = TESTS / path
        assert [group for group in GROUPS if is_in_group(item, group)] == [own]
    item.path = TESTS / "compat" / "test_a.py"
    item.add_marker("door")
    assert [group for group in GROUPS if is_in_group(item, group)] == ["core", "compat"]


def test_the_table_counts_by_folder_and_gives_reasons() -> None:
    def report(nodeid: str, outcome: Literal["passed", "skipped"], reason: Any = None) -> pytest.TestReport:
        return pytest.TestReport(nodeid, ("", 0, ""), {}, outcome, reason, "call")

    reports = [
        report("tests/blocks/test_a.py::test_b", "passed"),
        report("tests/test_c.py::test_d[x/y]", "passed"),
        report("tests/compat/ray/test_e.py::test_f", "skipped", ("file", 1, "Skipped: Ray is not installed")),
    ]
    assert list(cover_table(reports)) == [
        "blocks            1 passed",
        "compat/ray        0 passed, 1 skipped",
        "its own files     1 passed",
        "skipped 1: Ray is not installed",
    ]
