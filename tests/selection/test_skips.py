"""In CI, a test that is skipped although it could run lets the run fail."""

import pytest

from tests.selection.skips import NoOtherSkips, unexpected

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(("reason", "code"), [("needs a GPU", 0), ("Ray is not installed: make ray", 1)])
@pytest.mark.parametrize("whole_file", [True, False])
def test_only_skips_that_no_installation_changes_are_accepted(
    pytester: pytest.Pytester, reason: str, code: int, whole_file: bool
) -> None:
    skip = f"import pytest\npytest.skip({reason!r}, allow_module_level=True)"
    pytester.makepyfile(test_s=skip if whole_file else f"def test_s():\n    {skip.replace(chr(10), chr(10) + '    ')}")
    pytester.makepyfile(test_t="def test_t(): pass")
    options = ("-p", "no:cacheprovider", "-p", "no:timeout")
    result = pytester.runpytest_inprocess(*options, plugins=[NoOtherSkips()])
    assert result.ret == code
    assert any(reason in line for line in result.outlines if "FAILED" in line) == bool(code)
    assert pytester.runpytest_inprocess(*options).ret == 0


def test_a_missing_program_is_unexpected_and_a_missing_device_is_not() -> None:
    assert unexpected(["mpirun.mpich not installed", "needs a GPU", "mpirun.mpich not installed"]) == [
        "mpirun.mpich not installed"
    ]
