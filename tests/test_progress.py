"""Phases are shown while they last: redrawn on a terminal, as one line in a pipe if they last long, and not at all in a
library or in a forked process."""

import io
import os
import threading

import pytest

from meshwright import progress
from meshwright.progress import describe_seconds, phase, say, showing


class Terminal(io.StringIO):
    """A terminal. `drawn` is set when something was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        written = super().write(text)
        self.drawn.set()
        return written


class Pipe(Terminal):
    def isatty(self) -> bool:
        return False


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "_REFRESH_S", 0.001)


@pytest.mark.usefixtures("at_once")
def test_a_terminal_shows_the_phase_and_erases_it() -> None:
    terminal = Terminal()
    with showing(terminal), phase("tracing the model", 65):
        assert terminal.drawn.wait(10)
    assert "tracing the model, about 1 min 5 s …" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[2K")
    assert "\n" not in terminal.getvalue()


@pytest.mark.usefixtures("at_once")
def test_a_pipe_gets_one_plain_line_for_a_long_phase() -> None:
    pipe = Pipe()
    with showing(pipe), phase("tracing the model"):
        assert pipe.drawn.wait(10)
    assert pipe.getvalue() == "tracing the model …\n"


def test_a_pipe_gets_nothing_for_a_short_phase() -> None:
    pipe = Pipe()
    with showing(pipe), phase("tracing the model"), phase("importing", forks=True):
        pass
    assert pipe.getvalue() == ""


@pytest.mark.usefixtures("at_once")
def test_of_phases_within_each_other_the_innermost_is_shown() -> None:
    pipe = Pipe()
    with showing(pipe), phase("outer"):
        assert pipe.drawn.wait(10)
        pipe.drawn.clear()
        with phase("inner"):
            assert pipe.drawn.wait(10)
    assert pipe.getvalue() == "outer …\ninner …\n"


@pytest.mark.usefixtures("at_once")
def test_a_library_and_a_forked_process_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    with phase("without a command"):
        pass
    with showing(terminal):
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with phase("in a forked process"):
            pass
        monkeypatch.undo()
    assert terminal.getvalue() == ""


def test_before_a_fork_no_thread_is_started() -> None:
    terminal = Terminal()
    with showing(terminal):
        before = threading.active_count()
        with phase("importing PyTorch", forks=True):
            assert threading.active_count() == before
    assert "importing PyTorch …" in terminal.getvalue()


def test_a_line_is_printed_above_the_phase(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    with showing(terminal), phase("importing", forks=True):
        terminal.truncate(0)
        say("data.root is not set")
        assert terminal.getvalue().endswith("\r\x1b[2K")
    assert capsys.readouterr().err == "data.root is not set\n"


def test_durations_are_written_for_people() -> None:
    assert [describe_seconds(value) for value in (0.4, 59, 60, 125, 3600, 7500)] == [
        *("0 s", "59 s", "1 min", "2 min 5 s", "1 h", "2 h 5 min")
    ]
