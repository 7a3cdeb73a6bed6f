"""Records why a rank failed, and finds the first cause among the failures of all ranks."""

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
from meshwright.launch.heartbeat import (
    START_UP,
    Heartbeat,
    HeartbeatRecord,
    describe_progress,
    heartbeat_file,
    read_heartbeat,
)
from meshwright.launch.output import log_file

NO_ANSWER = "no answer within"  # every message about a timeout contains this
SIGNAL, EXIT = "signal", "exit"  # `kind` of failures without an exception

_LONGEST_MESSAGE = 1000
_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARY_FOLDERS = (Path(errors.__file__).parent, *map(Path, _INSTALLED))


@dataclass(frozen=True)
class Failure:
    """Why one rank failed, as it is written to the rank's record file. `kind` is the class name of the exception, or
    SIGNAL or EXIT. `step` and `doing` are the step and activity of the last heartbeat. `final` means that a restart
    would only repeat the failure."""

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
        """The failure in one line, for the user."""
        where = describe_progress(self.step, self.doing)
        if self.kind == CollectiveError.__name__:
            return self.message  # this message names rank, step and operation already
        if self.kind == SIGNAL:
            return f"rank {self.rank} was killed by {self.message}{where}"
        if self.kind == EXIT:
            return f"rank {self.rank} exited with code {self.message}{where}"
        error_class = getattr(errors, self.kind, None)
        is_ours = isinstance(error_class, type) and issubclass(error_class, MeshwrightError)
        return f"rank {self.rank} failed{where}: {self.message if is_ours else f'{self.kind}: {self.message}'}"


def failure_from_exception(error: BaseException, rank: int, attempt: int, heartbeat: Heartbeat) -> Failure:
    return Failure(
        rank=rank,
        attempt=attempt,
        kind=type(error).__name__,
        message=_one_line(_original_message(error)) + _where_raised(error),
        traceback="".join(traceback.format_exception(error)),
        step=heartbeat.step,
        doing=heartbeat.activity,
        time=time.time(),
        final=isinstance(error, InputError) or (not isinstance(error, CollectiveError) and heartbeat.completed == 0),
    )


def record_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.failure.json"


def write_record(folder: Path, failure: Failure) -> None:
    """Writes the record atomically, because the launcher may read it at any moment."""
    path = record_file(folder, failure.rank)
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(json.dumps(asdict(failure)))
    draft.replace(path)


def read_record(folder: Path, rank: int, attempt: int) -> Failure | None:
    """Returns the rank's failure in this attempt; None if none was recorded."""
    try:
        failure = Failure(**json.loads(record_file(folder, rank).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return failure if failure.attempt == attempt else None


def first_cause(folder: Path, attempt: int, exits: Mapping[int, int]) -> Failure | None:
    """Returns the failure that most likely caused the failures of the other ranks; None if no rank failed. `exits` are
    the exit codes by rank, negative for signals."""
    failures = [_failure_from_exit(folder, rank, attempt, code) for rank, code in exits.items() if code != 0]
    return min(failures, key=lambda failure: (_cause_order(failure), failure.time), default=None)


def is_consequence(failure: Failure) -> bool:
    """Whether the failure may only mean that another rank is gone or late."""
    return failure.kind == CollectiveError.__name__


def repeats(failure: Failure, previous: Failure | None) -> bool:
    """Whether a restart led to the same exception or the same timeout at the same step as `previous`. If so, another
    restart would fail again."""
    if previous is None or failure.kind == SIGNAL or (failure.kind, failure.step) != (previous.kind, previous.step):
        return False
    if is_consequence(failure):  # a connection can break for any reason, but a repeated timeout is a hang
        return NO_ANSWER in failure.message and NO_ANSWER in previous.message
    return failure.message == previous.message


def to_error(failure: Failure, folder: Path) -> MeshwrightError:
    """Returns the error to show to the user: the rank's message, then where its log is."""
    if failure.kind == InputError.__name__:
        return InputError(failure.message)
    count = failure.attempt
    restarts = f"after {count} restart{'s' if count > 1 else ''}; " if count else ""
    error = RankError(f"{failure.line}\n{restarts}its log: {log_file(folder, failure.rank)}")
    if failure.traceback:
        error.add_note(failure.traceback)
    return error


def _cause_order(failure: Failure) -> int:
    """Returns a number that is lower the more likely the failure is the first cause. Killed ranks come before
    exceptions, because a killed rank makes other ranks raise exceptions, but an exception kills no other rank."""
    if failure.kind == InputError.__name__:
        return 0
    if failure.kind == SIGNAL:
        return 1
    return 3 if is_consequence(failure) else 2


def _failure_from_exit(folder: Path, rank: int, attempt: int, code: int) -> Failure:
    """Returns the failure that the rank recorded or, if it recorded none, one derived from its exit code and
    heartbeat."""
    record = read_record(folder, rank, attempt)
    if record is not None:
        return record
    last_heartbeat = read_heartbeat(heartbeat_file(folder, rank))
    if last_heartbeat is None or last_heartbeat.attempt != attempt:
        last_heartbeat = HeartbeatRecord(0, attempt, -1, START_UP, 0)
    step, activity = last_heartbeat.step, last_heartbeat.activity
    if code == -signal.SIGABRT:
        timeout = _nccl_timeout(log_file(folder, rank), rank, last_heartbeat)
        if timeout:
            return Failure(rank, attempt, "CollectiveError", timeout, "", step, activity, time.time(), False)
    kind, message = (SIGNAL, _signal_name(-code)) if code < 0 else (EXIT, str(code))
    final = kind == EXIT and last_heartbeat.completed == 0
    return Failure(rank, attempt, kind, message, "", step, activity, time.time(), final)


def _nccl_timeout(log: Path, rank: int, last_heartbeat: HeartbeatRecord) -> str | None:
    """Returns the message for a timeout in NCCL; None if the log has none. NCCL's watchdog aborts the process instead
    of raising an exception, so the operation that timed out is named only in the log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 200_000))
            tail = file.read().decode(errors="replace").rpartition("--- attempt ")[2]
    except OSError:
        return None
    match = re.search(r"OpType=(\w+).*?Timeout\(ms\)=(\d+)", tail)
    if not match:
        return None
    operation, timeout_s = match[1].strip("_").lower().replace("_", "-"), int(match[2]) / 1000
    step = f"step {last_heartbeat.step}, " if last_heartbeat.step >= 0 else ""
    return f"rank {rank}, {step}{operation} ({last_heartbeat.activity}): {NO_ANSWER} {timeout_s:g} s"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _original_message(error: BaseException) -> str:
    """Returns the message of the exception. If it comes from a worker of a data loader, its message is the worker's
    whole traceback; then only the message of the worker's exception is returned."""
    text = str(error)
    _, worker, original = text.partition("Original Traceback (most recent call last):\n")
    if not worker:
        return text
    lines = original.splitlines()
    last = next((number for number, line in enumerate(lines) if line and not line[0].isspace()), len(lines))
    return "\n".join(lines[last:]).removeprefix(f"{type(error).__name__}: ") or text


def _where_raised(error: BaseException) -> str:
    """Returns the innermost line of the user's own code, such as ` (my_model.py, line 12)`. Code of meshwright and of
    installed libraries does not count. Empty if there is no such line."""
    if isinstance(error, MeshwrightError):
        return ""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    frames += re.findall(r'^  File "(.+)", line (\d+), in ', str(error), re.MULTILINE)  # a data loader's worker
    for file, line in reversed(frames):
        if not file.startswith("<") and not any(Path(file).is_relative_to(folder) for folder in _LIBRARY_FOLDERS):
            return f" ({Path(file).name}, line {line})"
    return ""


def _one_line(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]} …"
