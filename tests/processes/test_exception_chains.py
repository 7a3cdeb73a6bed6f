"""The chain of exceptions that one was raised from."""

import errno
import os

import pytest

from meshwright.errors import chain_of
from meshwright.processes.rank import has_no_files_left
from meshwright.user.code import user_position


def in_a_circle() -> tuple[OSError, ValueError]:
    """Two exceptions that were raised from each other, as happens where an error is explained twice."""
    first, second = OSError(errno.ENOSPC, "full"), ValueError("second")
    first.__context__, second.__cause__ = second, first
    return first, second


def test_each_exception_of_a_chain_is_visited_once() -> None:
    first, second = in_a_circle()
    assert list(chain_of(second)) == [second, first]
    assert list(chain_of(second, first)) == [second]
    assert list(chain_of(None)) == []


def test_causes_come_before_contexts() -> None:
    last, cause = RuntimeError("last"), OSError("cause")
    last.__context__, last.__cause__ = KeyError("context"), cause
    assert list(chain_of(last)) == [last, cause]


@pytest.mark.timeout(20)
def test_errors_that_were_raised_from_each_other_are_explained() -> None:
    first, second = in_a_circle()
    assert user_position(second) is None
    assert not has_no_files_left(second)
    first.__cause__ = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    assert has_no_files_left(second)
