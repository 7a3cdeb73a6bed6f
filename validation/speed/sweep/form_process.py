"""One form of a model in a process of its own: it builds the form, makes the first steps, and then times a round of
steps whenever it is told to. Whatever happens to the process becomes a `Failure`, and never ends the sweep.

The process is forked from one that has imported the libraries and has never used the GPU, so that no form waits for
imports, and all forms find the same modules imported. It leads a process group of its own, which is killed as a whole,
with the compiler's worker processes.
"""

import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from validation.speed.sweep.case import ModelCase
from validation.speed.sweep.forms import BY_HAND, OURS, Built, build_by_hand, build_ours

WARM_UP_STEPS = 8  # a session captures its step after the third
_ROUND_S, _FEWEST, _MOST = 0.4, 3, 400
_WARM_UP_OF_A_ROUND = 2
_LONGEST_TEXT = 300
_PACKAGE = f"{os.sep}meshwright{os.sep}"
_FORK = get_context("fork")


@dataclass(frozen=True)
class Failure:
    """Why a form has no figures: the last line of its exception, how its process ended, or that it took too long."""

    reason: str


@dataclass(frozen=True)
class FormOptions:
    """How a form is run. `cache` is the folder in which the compiler keeps its results. `tune_s` is that of
    `build_ours`."""

    tiny: bool
    device: str
    cache: Path
    tune_s: float | None = None


class FormProcess:
    """The process of one form, seen from the sweep."""

    def __init__(self, case: ModelCase, form: str, options: FormOptions) -> None:
        self._log = tempfile.NamedTemporaryFile(prefix="sweep-")  # noqa: SIM115
        self._connection, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_serve, args=(theirs, self._log.name, case, form, options))
        self._process.start()
        theirs.close()
        self._phase = "starting"

    def wait(self, until: float) -> dict[str, Any] | Failure:
        """The facts of a form that is ready, or the seconds of a step in a round; `until` is a time of
        `time.monotonic`. After a failure the process has ended."""
        begin = time.monotonic()
        while self._connection.poll(max(0.0, until - time.monotonic())):
            try:
                kind, content = self._connection.recv()
            except EOFError:
                self._process.join()
                return self._ended(f"the process ended with exit code {self._process.exitcode}: {self._last_line()}")
            if kind == "phase":
                self._phase = content
            elif kind == "failure":
                return self._ended(content)
            else:
                return dict(content)
        return self._ended(f"stopped after {time.monotonic() - begin:.0f} s while {self._phase}")

    def round(self, until: float) -> dict[str, Any] | Failure:
        """Times a round of steps."""
        try:
            self._connection.send("round")
        except OSError:
            return self._ended(f"the process has ended: {self._last_line()}")
        return self.wait(until)

    def end(self) -> None:
        """Kills the process and those that it has started."""
        if self._process.pid is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._process.kill()  # it has ended, or does not lead its group yet
        self._process.join()
        self._connection.close()
        self._log.close()

    def _ended(self, reason: str) -> Failure:
        self.end()
        return Failure(reason[:_LONGEST_TEXT])

    def _last_line(self) -> str:
        lines = Path(self._log.name).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it has printed nothing"


def run_probe(function: Callable[[], dict[str, Any]], limit_s: float) -> dict[str, Any] | Failure:
    """The result of a function that may use the GPU, which the sweep's own process must not."""
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=lambda: theirs.send(function()))
    process.start()
    theirs.close()
    try:
        return dict(ours.recv()) if ours.poll(limit_s) else Failure(f"stopped after {limit_s:.0f} s")
    except EOFError:
        return Failure("the process ended, see its error above")
    finally:
        process.kill()
        process.join()


def _serve(connection: Connection, log: str, case: ModelCase, form: str, options: FormOptions) -> None:
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.pop("TORCH_WARM_POOL", None)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(options.cache / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(options.cache / "triton")
    try:
        device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
        step, facts = _prepare(connection, case, form, options, device)
        count = max(_FEWEST, min(_MOST, int(_ROUND_S / facts["step_s"])))
        connection.send(("ready", facts))
        while connection.recv() == "round":
            connection.send(("round", {"step_s": _round_s(step, count, device)}))
    except EOFError:
        return
    except BaseException as error:
        traceback.print_exc()
        connection.send(("failure", _describe(error)))


def _prepare(
    connection: Connection, case: ModelCase, form: str, options: FormOptions, device: torch.device
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Builds the form and makes its first steps. Returns the step and what is known about it."""
    connection.send(("phase", "the model was being built"))
    if form == OURS:
        build: Callable[[], Built] = build_ours(case, options.tiny, device, options.tune_s)
    else:
        build = build_by_hand(case, options.tiny, device, BY_HAND[form])
    _synchronize(device)
    connection.send(("phase", "the first step was awaited"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begin = time.perf_counter()
        built = build()
        built.step()
        _synchronize(device)
        first_step_s = time.perf_counter() - begin
        connection.send(("phase", "the steps after the first were made"))
        for _ in range(WARM_UP_STEPS):
            built.step()
        _synchronize(device)
        step_s = _round_s(built.step, 1, device)
    facts = {"step_s": step_s, "first_step_s": first_step_s, **_memory(device), **built.facts}
    return built.step, facts | {"warnings": our_warnings(caught)}


def our_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    """The different warnings of the package, in order."""
    texts = [" ".join(str(one.message).split()) for one in caught if _PACKAGE in one.filename]
    return list(dict.fromkeys(text[:_LONGEST_TEXT] for text in texts))


def _memory(device: torch.device) -> Mapping[str, int]:
    if device.type != "cuda":
        return {}
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}


def _round_s(step: Callable[[], Any], count: int, device: torch.device) -> float:
    """Seconds of a step: of `count` steps in a row, between two CUDA events on a GPU. Memory that is kept free for the
    next steps is given back, because forms of other processes take turns on the GPU."""
    for _ in range(_WARM_UP_OF_A_ROUND):
        step()
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - begin) / count
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    for _ in range(count):
        step()
    last.record()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return first.elapsed_time(last) / 1e3 / count


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _describe(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:_LONGEST_TEXT]


def is_out_of_memory(reason: str) -> bool:
    return "OutOfMemory" in reason or "out of memory" in reason


def leave(status: int) -> None:
    """Ends a process of the sweep without the handlers that its libraries have registered."""
    sys.stdout.flush()
    os._exit(status)
