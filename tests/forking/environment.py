"""The environment variables of all tests, set before anything else is imported. Tests read no file of the user's cache
and write none there. What one test has measured or compiled serves those of the same run."""

import os
import tempfile

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ  # of pytest-xdist, which starts it from another process of tests
_FOLDER = tempfile.TemporaryDirectory(prefix="meshwright-tests-")

os.environ["XDG_STATE_HOME"] = f"{_FOLDER.name}/state"  # the key that signs the runs of tests is not that of the user
if not IS_WORKER:  # workers share the cache of the process that started them
    os.environ["XDG_CACHE_HOME"] = f"{_FOLDER.name}/cache"

AT_START = dict(os.environ)
