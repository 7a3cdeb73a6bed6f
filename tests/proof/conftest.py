"""Worlds of any size for the matrix of plans."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from tests.proof.tried import Worlds
from tests.ranks import ranks


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """One world of each size, started when a case first wants it."""
    with ExitStack() as stack:
        yield cache(lambda size: stack.enter_context(ranks(size, 300)))
