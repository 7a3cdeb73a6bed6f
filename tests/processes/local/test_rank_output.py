"""How the output of ranks appears in the process that called `mw.launch`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from meshwright.processes.local.rank_output import RankStream, Screen


@contextmanager
def stream(rank: int, screen: Screen, number: int = 1) -> Iterator[tuple[int, RankStream]]:
    """Yields the write end of a pipe, and the stream that shows what is written there."""
    read_end, write_end = os.pipe()
    yield write_end, RankStream(rank, number, read_end, screen)


def test_the_progress_bar_of_rank_0_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with stream(0, Screen(), number=2) as (write_end, shown):
        for text in (b"\r 10%", b"\r 20%"):
            os.write(write_end, text)
            assert shown.show(), "the rank may write more"
            assert capsys.readouterr() == ("", text.decode())
        os.write(write_end, b"\r100%\n")
        os.close(write_end)
        assert shown.show()
        assert not shown.show(), "the rank has closed it"
        shown.close()
    assert capsys.readouterr() == ("", "\r100%\n")


def test_lines_of_other_ranks_are_whole_and_begin_with_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    with stream(0, screen) as (first_end, first), stream(1, screen) as (second_end, second):
        os.write(first_end, b"epoch 1 ...")
        first.show()
        os.write(second_end, b"\r 10%\r 20%")
        second.show()
        assert capsys.readouterr().out == "epoch 1 ..."
        os.write(second_end, "\r100%\r\nzwölf".encode())
        second.show()
        os.write(first_end, b" done\n")
        first.show()
        os.close(second_end)
        second.close()
        os.close(first_end)
        first.close()
    assert capsys.readouterr().out == "\n[rank 1] 100%\n done\n[rank 1] zwölf\n"


def test_a_character_that_arrives_in_two_parts_and_one_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with stream(0, Screen()) as (write_end, shown):
        for part in ("ö".encode()[:1], "ö".encode()[1:], b"\xff\n"):
            os.write(write_end, part)
            shown.show()
        shown.close()  # although the pipe is open in another process
        os.close(write_end)
    assert capsys.readouterr().out == "ö\ufffd\n"
