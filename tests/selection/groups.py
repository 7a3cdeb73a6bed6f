"""Which tests belong to which target of the Makefile. Each test belongs to one.

    core         `make test`
    plans        `make test-plans`: searches for plans, predictions, and the jobs that they are made for
    proofs       `make test-proofs`: plans that are trained and compared with one process
    launch       `make test-launch`: commands, launchers, other users of the machine, and processes that end early
    compat       `make test-compat`: other libraries' training, and what is written for these
    docs         `make test-docs`: the blocks of the documentation, the notebooks and the site
    validation   `make test-validation`: published training runs, and the programs that measure

What is not listed in `PATHS` is in the core, so new files are always tested by `make test`. Of the others, the core has

    plans, proofs, launch   of each test function the cases that use least, up to `CORE_S` seconds of processors
                            together; the first of them may use `FIRST_S`                           (`cheapest_cases`)
    all                     what is marked `core`: one case through the real thing for each feature

A case that was not measured (measured.py) counts as one that uses nothing."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import pytest

from tests.selection.measured import measured_s

TESTS = Path(__file__).parents[1]
CORE = "core"
CORE_S, FIRST_S = 0.5, 1.5
BY_COST = ("plans", "proofs", "launch")
PATHS = {
    "plans": (
        "auto",
        "bench",
        "calibrate",
        "planner",
        "profile",
        "report",
        "selftest",
        "simulator",
        "validation/test_search.py",
        "workloads",
    ),
    "proofs": ("blocks", "checkpoint", "collectives", "parallel", "proof", "audit", "train", "validation/test_fuzz.py"),
    "launch": ("cli", "doors", "processes", "machines"),
    "compat": ("compat", "export"),
    "docs": ("documentation",),
    "validation": (
        "validation/collectives",
        "validation/engines",
        "validation/memory",
        "validation/predictions",
        "validation/runs",
    ),
}
GROUPS = (CORE, *PATHS)


def items_of_group(items: Iterable[pytest.Item], group: str) -> list[pytest.Item]:
    if group not in GROUPS:
        raise pytest.UsageError(f"--group={group}: there are {', '.join(GROUPS)}")
    items = list(items)
    by_cost = [item.nodeid for item in items if _owner(item) in BY_COST]
    cheap = cheapest_cases(by_cost, measured_s())
    return [item for item in items if group_of(item, cheap) == group]


def group_of(item: pytest.Item, cheap: Collection[str]) -> str:
    is_in_core = item.nodeid in cheap or item.get_closest_marker(CORE) is not None
    return CORE if is_in_core else _owner(item)


def _owner(item: pytest.Item) -> str:
    path = item.path.relative_to(TESTS)
    names = {path.as_posix(), *(parent.as_posix() for parent in path.parents)}
    return next((name for name, paths in PATHS.items() if names & set(paths)), CORE)


def cheapest_cases(names: Iterable[str], measured: Mapping[str, float]) -> set[str]:
    """The names of the cases that the core runs."""
    cheap: set[str] = set()
    used: dict[str, float] = {}
    for name in sorted(names, key=lambda name: measured.get(name, 0.0)):
        function, seconds = name.partition("[")[0], measured.get(name, 0.0)
        if used.get(function, 0.0) + seconds <= (CORE_S if function in used else FIRST_S):
            used[function] = used.get(function, 0.0) + seconds
            cheap.add(name)
    return cheap
