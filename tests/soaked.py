"""Cases of a table that only the soak runs."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def all_but(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases for `parametrize`: those that are not `kept` go to the soak."""

    def marked(case: Any) -> Any:
        values = case if isinstance(case, tuple) else (case,)
        return pytest.param(*values, marks=pytest.mark.soak)

    return [case if case in kept else marked(case) for case in cases]
