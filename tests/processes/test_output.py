"""The launcher cleans up the terminal that its ranks wrote to, and a full disk does not hide why a rank failed."""

import errno
import io
import warnings
from pathlib import Path

import pytest

from meshwright.processes import output
from meshwright.processes.output import clear_progress, explain_log_error, print_to_user


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


def test_the_speaker_prints_our_own_warnings_and_logs_those_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, logged = io.StringIO(), []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_: logged.append(str(message)))
        monkeypatch.setattr(warnings, "showwarning", output._warning_printer(terminal))
        warnings.warn_explicit("compiling failed\n at line 3", UserWarning, output.__file__, 1)
        warnings.warn_explicit("use something else", FutureWarning, io.__file__, 1)
    assert terminal.getvalue() == "warning: compiling failed at line 3\n"
    assert logged == ["compiling failed\n at line 3", "use something else"]


def test_output_to_a_log_on_a_full_disk_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    with Path("/dev/full").open("w") as full, (tmp_path / "rank-0.log").open("w") as usable:
        monkeypatch.setattr(output, "_log", full)
        assert str(explain_log_error(error)).startswith("/dev/full: the disk mounted at /dev")
        assert explain_log_error(ValueError("odd")) is None
        assert explain_log_error(OSError(errno.ENOSPC, "No space left on device", "/data/other")) is None
        monkeypatch.setattr(output, "_log", usable)
        assert explain_log_error(error) is None, "another disk is full"


def test_the_launcher_goes_on_if_its_own_output_is_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Path("/dev/full").open("w")  # noqa: SIM115
    monkeypatch.setattr("sys.stderr", stream)
    print_to_user("all ranks start again")
    with pytest.raises(OSError, match="No space left"):
        stream.close()
