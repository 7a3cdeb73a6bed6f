"""Faults that can be planted in the package's rules, to see whether the fuzzer finds them."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def plant(name: str) -> Iterator[None]:
    """Within this context, the package has the fault of this name."""
    yield
