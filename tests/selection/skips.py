"""Which skipped tests are no fault where everything was installed that can be: `pytest --no-other-skips`, as in CI.

Without the option any test may be skipped, and the summary says why."""

import re
from collections.abc import Iterable

import pytest

# What no installation changes: devices, processors, and what the system permits.
EXPECTED = (
    r"needs a GPU|there is no GPU|wherever there is one|where there is a GPU",
    r"other processors draw other dropout masks",
    r"need as many cores|need two cores|two tasks two cores",
    r"only root can|needs? root|not permit|no disk can be mounted here",
    r"reads the routes of Linux|no other address than the loopback's",
    r"there is no history here",
    # Other pinned versions than those of constraints.txt, or an environment of its own that takes long to install.
    r"needs pip install 'meshwright\[remote\]'",
    r"make peers|make megatron|DeepSpeed is not installed",
)


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test, or a file of tests, was skipped; empty if it was not."""
    if not report.skipped or not isinstance(report.longrepr, tuple):
        return ""
    return str(report.longrepr[2]).removeprefix("Skipped: ")


def unexpected(reasons: Iterable[str]) -> list[str]:
    return sorted({reason for reason in reasons if not any(re.search(words, reason) for words in EXPECTED)})


class NoOtherSkips:
    """A plugin that lets the run fail if tests were skipped for other reasons."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reasons += filter(None, [reason(report)])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.reasons += filter(None, [reason(report)])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if unexpected(self.reasons) and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for text in unexpected(self.reasons):
            terminalreporter.write_line(f"FAILED: tests were skipped that can run here: {text}", red=True)
