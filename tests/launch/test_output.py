"""The launcher cleans up the terminal that its ranks wrote to."""

import io

import pytest

from meshwright.launch.output import clear_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_bar_of_a_killed_rank_is_erased_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        monkeypatch.setattr("sys.stderr", stream)
        clear_progress()
    assert terminal.getvalue() == "\r\x1b[2K\x1b[?25h"
    assert file.getvalue() == ""
