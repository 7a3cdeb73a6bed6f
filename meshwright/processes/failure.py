"""Records why a rank failed, and finds the first cause among the failures of all ranks. Ranks send their records to the
launcher through its store, because the disk of the run folder may be what failed."""

import json
import re
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright import errors
from meshwright.errors import (
    CollectiveError,
    InputError,
    MeshwrightError,
    OutOfMemory,
    RankError,
    StorageError,
    TrainingDiverged,
)
from meshwright.processes.heartbeat import (
    START_UP,
    Heartbeat,
    HeartbeatRecord,
    describe_progress,
    heartbeat_file,
    read_heartbeat,
)
from meshwright.processes.output import log_file, print_to_user
from meshwright.user.code import is_user_file, printable

if TYPE_CHECKING:
    from torch.distributed import Store

NO_ANSWER = "no answer within"  # every message about a timeout contains this
SIGNAL, EXIT, EARLY_END = "signal", "exit", "early end"  # `kind` of failures without an exception
UNFINISHED = 256  # stands for the exit code 0 of a rank that ended before its work was done; real codes are smaller

_LONGEST_MESSAGE = 1000


@dataclass(frozen=True)
class Failure:
    """Why one rank failed, as the rank tells the launcher. `kind` is the class name of the exception, or SIGNAL, EXIT
    or EARLY_END. `step` and `doing` are the step and activity of the last heartbeat. `final` means that a restart would
    only repeat the failure. `report` is the path of a file with the stacks of all ranks, if there is one."""

    rank: int
    attempt: int
    kind: str
    message: str
    traceback: str
    step: int
    doing: str
    time: float
    final: bool
    report: str | None = None

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
        if self.kind == EARLY_END:
            return f"rank {self.rank} ended with exit code {self.message} before training was finished{where}"
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
        final=isinstance(error, InputError | StorageError | TrainingDiverged)
        or (not isinstance(error, CollectiveError) and heartbeat.completed == 0),
        report=error.report if isinstance(error, CollectiveError) else None,
    )


def write_record(store: "Store", failure: Failure) -> None:
    """Writes the record to the launcher's store, and returns when the store has it."""
    from meshwright.processes.token.signed_store import write  # imports torch

    key = _record_key(failure.rank, failure.attempt)
    write(store, key, json.dumps(asdict(failure)))
    store.get(key)  # `set` does not wait for an answer, and the rank is about to end


def read_record(store: "Store", rank: int, attempt: int) -> Failure | None:
    """Returns the rank's failure in this attempt; None if none was recorded."""
    from meshwright.processes.token.signed_store import StrangerError, read  # imports torch

    key = _record_key(rank, attempt)
    if not store.check([key]):
        return None
    try:
        return Failure(**json.loads(read(store, key)))
    except StrangerError as error:
        print_to_user(f"refused: {error}")
        return None


def delete_record(store: "Store", rank: int, attempt: int) -> None:
    """Deletes the record of a rank that is started again in the same attempt."""
    store.delete_key(_record_key(rank, attempt))


def _record_key(rank: int, attempt: int) -> str:
    return f"failure of rank {rank} in attempt {attempt}"


def first_cause(
    store: "Store", folder: Path, attempt: int, exits: Mapping[int, int], memory_was_full: bool = False
) -> Failure | None:
    """Returns the failure that most likely caused the failures of the other ranks; None if no rank failed. `store` has
    the ranks' records, and `folder` their logs and heartbeats. `exits` are the exit codes by rank, negative for
    signals. `memory_was_full`: the system has killed a process for this reason since the ranks were started."""
    failures = [_failure_from_exit(store, folder, rank, attempt, code) for rank, code in exits.items() if code != 0]
    if memory_was_full:
        failures = [_with_reason(failure) if failure.kind == SIGNAL else failure for failure in failures]
    return min(failures, key=lambda failure: (_cause_order(failure), failure.time), default=None)


def _with_reason(failure: Failure) -> Failure:
    """Returns the failure of a rank that may have been killed because memory was full."""
    if failure.message != signal.SIGKILL.name:
        return failure
    return replace(failure, message=f"{failure.message}, which the system sends when memory is full and did just then,")


def is_consequence(failure: Failure) -> bool:
    """Whether the failure may only mean that another rank is gone or late."""
    return failure.kind == CollectiveError.__name__


def repeats(failure: Failure, previous: Failure | None) -> bool:
    """Whether a restart led to the same exception or the same timeout at the same step as `previous`. If so, another
    restart would fail again."""
    if previous is None or failure.kind == SIGNAL or (failure.kind, failure.step) != (previous.kind, previous.step):
        return False
    if failure.kind == OutOfMemory.__name__:  # what was in use may differ
        return True
    if is_consequence(failure):  # a connection can break for any reason, but a repeated timeout is a hang
        return NO_ANSWER in failure.message and NO_ANSWER in previous.message
    return failure.message == previous.message


def to_error(failure: Failure, folder: Path) -> MeshwrightError:
    """Returns the error to show to the user: the rank's message, then where its log is."""
    if failure.kind == InputError.__name__:
        return InputError(failure.message)
    if failure.kind == StorageError.__name__:  # its log may be on the same disk
        return StorageError(failure.line)
    if failure.kind == TrainingDiverged.__name__:  # not a failure of one rank: all ranks end at the same step
        return TrainingDiverged(failure.message)
    count = failure.attempt
    restarts = f"after {count} restart{'s' if count > 1 else ''}; " if count else ""
    files = (
        f"the report of all ranks: {failure.report}" if failure.report else f"its log: {log_file(folder, failure.rank)}"
    )
    kind = OutOfMemory if failure.kind == OutOfMemory.__name__ else RankError
    error = kind(f"{failure.line}\n{restarts}{files}")
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


def _failure_from_exit(store: "Store", folder: Path, rank: int, attempt: int, code: int) -> Failure:
    """Returns the failure that the rank recorded or, if it recorded none, one derived from its exit code and
    heartbeat."""
    record = read_record(store, rank, attempt)
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
    logged = _logged_exception(log_file(folder, rank)) if 0 < code < UNFINISHED else None
    kind, message = (SIGNAL, signal_name(-code)) if code < 0 else logged or (EXIT, str(code))
    if code == UNFINISHED:
        kind, message = EARLY_END, "0"
    final = kind != SIGNAL and last_heartbeat.completed == 0
    return Failure(rank, attempt, kind, message, "", step, activity, time.time(), final)


def _nccl_timeout(log: Path, rank: int, last_heartbeat: HeartbeatRecord) -> str | None:
    """Returns the message for a timeout in NCCL; None if the log has none. NCCL's watchdog aborts the process instead
    of raising an exception, so the operation that timed out is named only in the log."""
    match = re.search(r"OpType=(\w+).*?Timeout\(ms\)=(\d+)", _end_of_log(log))
    if not match:
        return None
    operation, timeout_s = match[1].strip("_").lower().replace("_", "-"), int(match[2]) / 1000
    step = f"step {last_heartbeat.step}, " if last_heartbeat.step >= 0 else ""
    return f"rank {rank}, {step}{operation} ({last_heartbeat.activity}): {NO_ANSWER} {timeout_s:g} s"


def _logged_exception(log: Path) -> tuple[str, str] | None:
    """Returns the class and the message of the exception that a rank has written to its log; None if there is none. The
    rank could not tell the launcher, for example because neither can open another file or connection."""
    _, begin, last = _end_of_log(log).rpartition("Traceback (most recent call last):\n")
    # The words in which an exception is explained follow its traceback, as the line of an exception of their own.
    lines = re.findall(r"^(?:\w+\.)*([A-Z]\w+): (.+)$", last, re.MULTILINE) if begin else []
    return (lines[-1][0], _one_line(lines[-1][1])) if lines else None


def _end_of_log(log: Path) -> str:
    """Returns the end of what a rank has written in its last attempt; empty if its log cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 200_000))
            return file.read().decode(errors="replace").rpartition("--- attempt ")[2]
    except OSError:
        return ""


def signal_name(number: int) -> str:
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
        if is_user_file(file):
            return f" ({Path(file).name}, line {line})"
    return ""


def _one_line(message: str) -> str:
    line = printable(" ".join(message.split()))
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]} …"
