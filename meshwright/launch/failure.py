"""Why the ranks failed: each failing rank leaves a record, and of all of them the first cause is told."""

import json
import os
import re
import signal
import sysconfig
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright import errors
from meshwright.errors import CollectiveError, InputError, MeshwrightError, RankError
from meshwright.launch.output import log_file
from meshwright.launch.place import START_UP, Place, Seen, describe, place_file, read_place

NO_ANSWER = "no answer within"  # what a message about a timeout says
SIGNAL, EXIT = "signal", "exit"  # kinds of failures without an exception

_LONGEST_MESSAGE = 1000
_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_NOT_THE_USERS = (Path(errors.__file__).parent, *map(Path, _INSTALLED))


@dataclass(frozen=True)
class Failure:
    """`kind` is the exception's class name; `final` says that another attempt would only repeat it."""

    rank: int
    attempt: int
    kind: str
    message: str
    traceback: str
    step: int
    doing: str
    time: float
    final: bool

    @property
    def line(self) -> str:
        where = describe(self.step, self.doing)
        if self.kind == CollectiveError.__name__:
            return self.message  # it names rank, step and operation itself
        if self.kind == SIGNAL:
            return f"rank {self.rank} was killed by {self.message}{where}"
        if self.kind == EXIT:
            return f"rank {self.rank} exited with code {self.message}{where}"
        known = getattr(errors, self.kind, None)
        told = isinstance(known, type) and issubclass(known, MeshwrightError)
        return f"rank {self.rank} failed{where}: {self.message if told else f'{self.kind}: {self.message}'}"


def of_exception(error: BaseException, rank: int, attempt: int, place: Place) -> Failure:
    return Failure(
        rank=rank,
        attempt=attempt,
        kind=type(error).__name__,
        message=_one_line(_own_words(error)) + _where_raised(error),
        traceback="".join(traceback.format_exception(error)),
        step=place.step,
        doing=place.doing,
        time=time.time(),
        final=isinstance(error, InputError) or (not isinstance(error, CollectiveError) and place.completed == 0),
    )


def record_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.failure.json"


def write_record(folder: Path, failure: Failure) -> None:
    """Whole or not at all: the launcher may read it at any moment."""
    path = record_file(folder, failure.rank)
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(json.dumps(asdict(failure)))
    draft.replace(path)


def read_record(folder: Path, rank: int, attempt: int) -> Failure | None:
    try:
        failure = Failure(**json.loads(record_file(folder, rank).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return failure if failure.attempt == attempt else None


def first_cause(folder: Path, attempt: int, exits: Mapping[int, int]) -> Failure | None:
    """The failure that explains the others; `exits` are the exit codes by rank, negative for signals."""
    failures = [_of_exit(folder, rank, attempt, code) for rank, code in exits.items() if code != 0]
    return min(failures, key=lambda failure: (_order(failure), failure.time), default=None)


def is_consequence(failure: Failure) -> bool:
    """Whether it may only tell that another rank is gone or late."""
    return failure.kind == CollectiveError.__name__


def repeats(failure: Failure, before: Failure | None) -> bool:
    """Whether a restart led to the same exception, or to the same silence, at the same step: another one would too."""
    if before is None or failure.kind == SIGNAL or (failure.kind, failure.step) != (before.kind, before.step):
        return False
    if is_consequence(failure):  # a broken connection may be anything; who is late again hangs
        return NO_ANSWER in failure.message and NO_ANSWER in before.message
    return failure.message == before.message


def to_error(failure: Failure, folder: Path) -> MeshwrightError:
    """What the user is told: the rank's own words first, then where to read more."""
    if failure.kind == InputError.__name__:
        return InputError(failure.message)
    count = failure.attempt
    tried = f"after {count} restart{'s' if count > 1 else ''}; " if count else ""
    error = RankError(f"{failure.line}\n{tried}its log: {log_file(folder, failure.rank)}")
    if failure.traceback:
        error.add_note(failure.traceback)
    return error


def _order(failure: Failure) -> int:
    """A killed rank makes others fail in many ways; an exception kills no other rank."""
    if failure.kind == InputError.__name__:
        return 0
    if failure.kind == SIGNAL:
        return 1
    return 3 if is_consequence(failure) else 2


def _of_exit(folder: Path, rank: int, attempt: int, code: int) -> Failure:
    record = read_record(folder, rank, attempt)
    if record is not None:
        return record
    seen = read_place(place_file(folder, rank))
    if seen is None or seen.attempt != attempt:
        seen = Seen(0, attempt, -1, START_UP, 0)
    if code == -signal.SIGABRT:
        timeout = _nccl_timeout(log_file(folder, rank), rank, seen)
        if timeout:
            return Failure(rank, attempt, "CollectiveError", timeout, "", seen.step, seen.doing, time.time(), False)
    kind, message = (SIGNAL, _signal_name(-code)) if code < 0 else (EXIT, str(code))
    final = kind == EXIT and seen.completed == 0
    return Failure(rank, attempt, kind, message, "", seen.step, seen.doing, time.time(), final)


def _nccl_timeout(log: Path, rank: int, seen: Seen) -> str | None:
    """NCCL's watchdog aborts the process instead of raising: what it waited for is only in the log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 200_000))
            tail = file.read().decode(errors="replace").rpartition("--- attempt ")[2]
    except OSError:
        return None
    found = re.search(r"OpType=(\w+).*?Timeout\(ms\)=(\d+)", tail)
    if not found:
        return None
    operation, timeout_s = found[1].strip("_").lower().replace("_", "-"), int(found[2]) / 1000
    step = f"step {seen.step}, " if seen.step >= 0 else ""
    return f"rank {rank}, {step}{operation} ({seen.doing}): {NO_ANSWER} {timeout_s:g} s"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _own_words(error: BaseException) -> str:
    """The message; of an exception in a data loader's worker, which carries a whole traceback, what it said there."""
    text = str(error)
    _, worker, original = text.partition("Original Traceback (most recent call last):\n")
    if not worker:
        return text
    lines = original.splitlines()
    last = next((at for at, line in enumerate(lines) if line and not line[0].isspace()), len(lines))
    return "\n".join(lines[last:]).removeprefix(f"{type(error).__name__}: ") or text


def _where_raised(error: BaseException) -> str:
    """` (my_model.py, line 12)`: the innermost line that is neither ours nor installed, which a user can mend."""
    if isinstance(error, MeshwrightError):
        return ""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    frames += re.findall(r'^  File "(.+)", line (\d+), in ', str(error), re.MULTILINE)  # a data loader's worker
    for file, line in reversed(frames):
        if not file.startswith("<") and not any(Path(file).is_relative_to(place) for place in _NOT_THE_USERS):
            return f" ({Path(file).name}, line {line})"
    return ""


def _one_line(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]} …"
