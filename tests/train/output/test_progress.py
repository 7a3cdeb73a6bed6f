"""A bar on a terminal, plain lines elsewhere; both say step, loss and speed."""

import io
from pathlib import Path

import pytest

from meshwright.train.output.progress import BarDisplay, LineDisplay, SilentDisplay, describe_metrics, make_display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    shown = make_display(stream, 100, 0)
    assert isinstance(shown, LineDisplay)
    shown.step(10, 0.25, 1234.5)
    shown.step(20, 0.125, None)
    shown.line("evaluation")
    shown.close()
    assert stream.getvalue().splitlines() == [
        "step 10 of 100: loss 0.2500, 1,234 samples/s",
        "step 20 of 100: loss 0.1250",
        "evaluation",
    ]


def test_a_stream_without_length_has_no_total() -> None:
    stream = io.StringIO()
    make_display(stream, None, 0).step(10, 0.25, None)
    assert stream.getvalue() == "step 10: loss 0.2500\n"


def test_a_bar_on_a_terminal_with_step_loss_and_speed() -> None:
    stream = Terminal()
    shown = make_display(stream, 100, 40)
    assert isinstance(shown, BarDisplay)
    shown.step(50, 0.25, 1234.5)
    shown.close()
    for words in ("50/100", "loss 0.2500", "1,234 samples/s"):
        assert words in stream.getvalue()


def test_lines_above_the_bar_are_shown_as_they_are() -> None:
    """A path may hold what rich takes for markup, and be longer than the terminal is wide."""
    stream, path = Terminal(), "/runs/[/red][bold]x:smile:/" + "long/" * 40
    shown = make_display(stream, 100, 0)
    shown.line(f"in {path}")
    shown.close()
    assert f"in\n  {path}" in stream.getvalue()


def test_both_say_what_else_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    monkeypatch.setattr("meshwright.train.output.progress.SHOWN_AFTER_S", -1.0)
    for stream in (terminal, pipe):
        shown = make_display(stream, 100, 0)
        with shown.activity("saving"):
            pass
        shown.close()
    assert "saving" in terminal.getvalue()
    assert pipe.getvalue() == "saving took 0 s\n"


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    silent = SilentDisplay()
    silent.step(1, 0.5, None)
    silent.line("x")
    silent.close()
    assert capsys.readouterr() == ("", "")


def test_metrics_in_one_line() -> None:
    assert describe_metrics({"loss": 0.04123, "accuracy": 0.98712}) == "accuracy 0.9871, loss 0.0412"


def test_lines_that_cannot_be_printed_do_not_end_the_run() -> None:
    stream = Path("/dev/full").open("w")  # noqa: SIM115
    LineDisplay(stream, 100).line("step 10")
    with pytest.raises(OSError, match="No space left"):
        stream.close()
