"""Shows what the ranks of `mw.launch` print where the caller prints, in a notebook below the cell that runs.

What rank 0 prints is shown as it is, so that it looks like the output of a single process, progress bars included. Of
other ranks whole lines are shown, which begin with `[rank 1]`; of a progress bar that is the last state.
"""

import codecs
import os
import sys
from typing import TextIO

_BLOCK_BYTES = 1 << 16


class Screen:
    """The caller's stdout (number 1) and stderr (number 2), on which all ranks print."""

    def __init__(self) -> None:
        self._unfinished: set[int] = set()  # streams in which the last line of rank 0 has no end yet

    def print_as_is(self, number: int, text: str) -> None:
        if text.endswith("\n"):
            self._unfinished.discard(number)
        else:
            self._unfinished.add(number)
        self._write(number, text)

    def print_line(self, number: int, line: str) -> None:
        """Prints a line after the end of the unfinished lines of rank 0, which continue in the next line."""
        self.end_lines()
        self._write(number, f"{line}\n")

    def end_lines(self) -> None:
        for number in sorted(self._unfinished):
            self._write(number, "\n")
        self._unfinished.clear()

    def _write(self, number: int, text: str) -> None:
        stream: TextIO = sys.stdout if number == 1 else sys.stderr
        stream.write(text)
        stream.flush()


class RankStream:
    """The read end of a pipe to which one rank writes its stdout (`number` 1) or stderr (2)."""

    def __init__(self, rank: int, number: int, descriptor: int, screen: Screen) -> None:
        self._rank = rank
        self._number = number
        self._descriptor = descriptor
        self._screen = screen
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._line = ""
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        return self._descriptor

    def show(self) -> bool:
        """Shows what the rank has written, at most one block. Returns False when it can write no more."""
        return self._show_block() != b""

    def close(self) -> None:
        """Shows what is left in the pipe, and closes it."""
        while self._show_block():
            pass
        self._print(self._decoder.decode(b"", final=True))
        if self._line:
            self._print("\n")
        os.close(self._descriptor)

    def _show_block(self) -> bytes | None:
        """Returns the block that was shown: None if nothing has been written since, empty at the end of the pipe."""
        try:
            block = os.read(self._descriptor, _BLOCK_BYTES)
        except BlockingIOError:
            return None
        self._print(self._decoder.decode(block))
        return block

    def _print(self, text: str) -> None:
        if self._rank == 0:
            if text:
                self._screen.print_as_is(self._number, text)
            return
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            visible = line.rstrip("\r").rpartition("\r")[2]
            self._screen.print_line(self._number, f"[rank {self._rank}] {visible}")
