"""The environment variables of all tests. Tests read no file of the user's cache and write none there. What one test
has measured or compiled serves the others of the same run."""

import os
import tempfile
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ  # of pytest-xdist, which starts it from another process of tests
AT_START: dict[str, str] = {}  # the variables before the first test


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="meshwright-tests-")


def set_variables() -> None:
    """Sets them for this process and for those that it starts."""
    os.environ["XDG_STATE_HOME"] = f"{_folder().name}/state"  # the key that signs the runs of tests is not the user's
    if not IS_WORKER:  # workers share the cache of the process that started them
        os.environ["XDG_CACHE_HOME"] = f"{_folder().name}/cache"
    AT_START.update(os.environ)
