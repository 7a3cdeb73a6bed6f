"""The fixture `assert_same_training` for pytest, which finds it where Meshwright is installed. Nothing heavy is
imported before a test uses it."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def assert_same_training(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`assert_same_training(reference, candidate)` fails unless both train the same model. Each is a command, the
    folder of a record, or a function of `record` that trains in `with record(model, optimizer):`. Options: `steps`,
    `start`, `keep_dropout`, `cpu`, `timeout_s` and `threads`, as those of `meshwright audit`."""

    def check(reference: Any, candidate: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        from meshwright.audit.audit import AuditFailed, AuditRequest
        from meshwright.audit.from_python.same_training import compare_trainings

        request = AuditRequest(str(reference), str(candidate), **options)
        try:
            result = compare_trainings(reference, candidate, tmp_path_factory.mktemp("training"), request)
        except AuditFailed as error:
            pytest.fail("\n".join([str(error), *(f"    {line}" for line in error.lines)]), pytrace=False)
        if not result.equal:
            pytest.fail(str(result), pytrace=False)
        return result

    return check
