"""Every test belongs to one target of the Makefile, and `make test` trains through other libraries, too."""

import re

import pytest

from tests.selection.groups import (
    CORE_S,
    FIRST_S,
    GROUPS,
    PATHS,
    TESTS,
    cheapest_cases,
    group_of,
    items_of_group,
)

# Ray has an environment of its own, which `make test` does not install.
LIBRARIES = [
    path for path in sorted((TESTS / "compat").iterdir()) if (path / "__init__.py").exists() and path.name != "ray"
]


def test_the_files_and_folders_of_the_groups_exist() -> None:
    assert [path for paths in PATHS.values() for path in paths if not (TESTS / path).exists()] == []


def test_every_group_has_a_target_that_ci_runs() -> None:
    makefile, ci = ((TESTS.parent / name).read_text() for name in ("Makefile", ".ci/run"))
    targets = next(line for line in makefile.splitlines() if line.startswith("GROUPS := ")).split()[2:]
    assert ["core", *targets] == list(GROUPS)
    assert all(f"test-{target}" in ci for target in targets)
    assert "run soak" in ci


def test_the_core_has_a_test_of_each_library() -> None:
    marked = re.compile(r"@pytest.mark.core|some_in_core\(")
    for library in LIBRARIES:
        assert any(marked.search(file.read_text()) for file in library.glob("test_*.py")), library.name


def test_a_test_is_in_one_group(request: pytest.FixtureRequest) -> None:
    """Of this test, put into other folders."""
    item = request.node
    for path, group in {
        "data/test_a.py": "core",
        "planner/test_a.py": "plans",
        "validation/test_a.py": "core",
        "validation/test_fuzz.py": "proofs",
        "validation/runs/models/test_a.py": "validation",
        "compat/ray/test_a.py": "compat",
        "documentation/test_a.py": "docs",
        "processes/local/test_a.py": "launch",
    }.items():
        item.path = TESTS / path
        assert group_of(item, cheap=()) == group
        assert group_of(item, cheap=[item.nodeid]) == "core"
    item.add_marker("core")
    assert group_of(item, cheap=()) == "core"


def test_the_core_has_the_cheapest_cases_of_each_function() -> None:
    seconds = {"f[a]": 0.25, "f[b]": 0.2, "f[c]": 0.15, "g[a]": FIRST_S, "g[b]": FIRST_S, "h": FIRST_S + 0.1}
    assert CORE_S == 0.5
    assert cheapest_cases([*seconds, "f[new]", "new"], seconds) == {"f[c]", "f[b]", "f[new]", "g[a]", "new"}


def test_all_groups_together_have_all_tests_once(request: pytest.FixtureRequest) -> None:
    items = request.session.items
    groups = [items_of_group(items, group) for group in GROUPS]
    assert sorted(item.nodeid for group in groups for item in group) == sorted(item.nodeid for item in items)
