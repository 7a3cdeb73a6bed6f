"""Which tests belong to which target of the Makefile, and a table of what was run.

    core         `make test`: everything that is not in another group, and the tests marked `door`
    compat       `make test-compat`: the doors for people who come with other libraries, and what is written for these
    docs         `make test-docs`: the blocks of the documentation, the notebooks and the site
    validation   `make test-validation`: published training runs, and the programs that measure

A folder of `tests/` is in `core` unless it is listed here, so a new folder is always tested by `make test`."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CORE = "core"
FOLDERS = {
    "compat": ("compat", "deepspeed_config", "export"),
    "docs": ("documentation",),
    "validation": (
        "validation/collectives",
        "validation/engines",
        "validation/memory",
        "validation/predictions",
        "validation/runs",
    ),
}
GROUPS = (CORE, *FOLDERS)


def is_in_group(item: pytest.Item, group: str) -> bool:
    folder = f"{item.path.parent.relative_to(TESTS).as_posix()}/"
    owners = (name for name, folders in FOLDERS.items() if folder.startswith(tuple(f"{one}/" for one in folders)))
    return next(owners, CORE) == group or (group == CORE and item.get_closest_marker("door") is not None)


def tests_of_group(items: Iterable[pytest.Item], group: str) -> list[pytest.Item]:
    if group not in GROUPS:
        raise pytest.UsageError(f"--group={group}: there are {', '.join(GROUPS)}")
    return [item for item in items if is_in_group(item, group)]


def cover_table(reports: Iterable[pytest.TestReport]) -> Iterator[str]:
    """Yields lines with the numbers of tests by folder, and after them those with the reasons for what was skipped."""
    counts: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    for report in reports:
        parts = Path(report.nodeid.partition("::")[0]).relative_to("tests").parts
        folder = "/".join(parts[: 2 if parts[0] == "compat" else 1]) if len(parts) > 1 else "its own files"
        counts.setdefault(folder, Counter())[report.outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    width = max(map(len, counts), default=0)
    for folder, count in sorted(counts.items()):
        skipped = f", {count['skipped']} skipped" if count["skipped"] else ""
        yield f"{folder:{width}} {count['passed']:5} passed{skipped}"
    for reason, number in reasons.most_common():
        yield f"skipped {number}: {reason}"
