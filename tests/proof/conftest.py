"""Worlds of ranks for the matrix of plans."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from tests.proof.matrix_case import Worlds
from tests.ranks import ranks


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """A function that returns the world of a size, which it starts when it is first called with that size."""
    with ExitStack() as stack:
        yield cache(lambda size: stack.enter_context(ranks(size, 300)))
