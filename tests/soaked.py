"""Which cases of a table `make test` runs, which another target, and which only the soak."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def all_but(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases for `parametrize`: those that are not `kept` go to the soak."""
    return [case if case in kept else _marked(case, pytest.mark.soak) for case in cases]


def some_in_core(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """The cases for `parametrize` in a file of another group than the core: the core has as many of them as `count`
    says, at equal distances and beginning with the first."""
    listed = list(cases)
    chosen = {number * len(listed) // count for number in range(count)}
    return [_marked(case, pytest.mark.core) if number in chosen else case for number, case in enumerate(listed)]


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    if hasattr(case, "marks"):  # it has marks already
        return case._replace(marks=(*case.marks, mark))
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
