"""Shows the progress of a run: as a bar on a terminal, and as lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshwright.progress import SHOWN_AFTER_S, describe_seconds, wrapped

_FIRST_STEP, _STEPS = "first step", "step"  # the first one may compile


class Display(Protocol):
    """Shows a run's progress. `advance` is called after every step, `step` when the loss of a step is logged, and
    `line` with a line of text to print. `activity` shows what else the run does within its context, such as saving."""

    def advance(self, step: int) -> None: ...

    def step(self, step: int, loss: float, samples_per_s: float | None) -> None: ...

    def line(self, text: str) -> None: ...

    def activity(self, text: str) -> AbstractContextManager[None]: ...

    def close(self) -> None: ...


class SilentDisplay:
    """Shows nothing; for ranks other than rank 0."""

    def advance(self, step: int) -> None: ...

    def step(self, step: int, loss: float, samples_per_s: float | None) -> None: ...

    def line(self, text: str) -> None: ...

    def activity(self, text: str) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None: ...


class LineDisplay:
    """Prints one line per logged step."""

    def __init__(self, stream: TextIO, total: int | None) -> None:
        self._stream = stream
        self._total = f" of {total}" if total else ""

    def advance(self, step: int) -> None: ...

    def step(self, step: int, loss: float, samples_per_s: float | None) -> None:
        rate = f", {samples_per_s:,.0f} samples/s" if samples_per_s else ""
        self.line(f"step {step}{self._total}: loss {loss:.4f}{rate}")

    def line(self, text: str) -> None:
        with suppress(OSError):  # a stream that cannot take it, such as a file on a full disk, does not end the run
            print(text, file=self._stream, flush=True)

    @contextmanager
    def activity(self, text: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        seconds = time.monotonic() - begin
        if seconds > SHOWN_AFTER_S:
            self.line(f"{text} took {describe_seconds(seconds)}")

    def close(self) -> None: ...


class BarDisplay:
    """Shows a progress bar on a terminal."""

    def __init__(self, stream: TextIO, total: int | None, start: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(file=stream),
        )
        self._task = self._progress.add_task(_FIRST_STEP, total=total, completed=start, loss="–", rate="")
        self._progress.start()

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step, description=_STEPS)

    @contextmanager
    def activity(self, text: str) -> Iterator[None]:
        self._progress.update(self._task, description=text, refresh=True)
        try:
            yield
        finally:
            self._progress.update(self._task, description=_STEPS)

    def step(self, step: int, loss: float, samples_per_s: float | None) -> None:
        rate = f"{samples_per_s:,.0f} samples/s" if samples_per_s else ""
        self._progress.update(self._task, completed=step, loss=f"{loss:.4f}", rate=rate)

    def line(self, text: str) -> None:
        console = self._progress.console
        console.print(wrapped(text, console.width), highlight=False, markup=False, emoji=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def make_display(stream: TextIO, total: int | None, start: int) -> Display:
    """Returns the display for a stream: a bar on a terminal, otherwise lines. `total` is the number of steps of the
    run, or None if it is unknown."""
    return BarDisplay(stream, total, start) if stream.isatty() else LineDisplay(stream, total)


def describe_metrics(metrics: dict[str, Any]) -> str:
    """The metrics in one line, such as `accuracy 0.9871, loss 0.0412`."""
    return ", ".join(f"{name} {value:.4f}" for name, value in sorted(metrics.items()))
