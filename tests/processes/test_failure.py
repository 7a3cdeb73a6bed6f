"""Of several failing ranks, the one that explains the others is reported."""

import dataclasses
import errno
import os
import re
import signal
from pathlib import Path
from traceback import format_exception

import pytest
from torch.distributed import HashStore
from torch.utils.data import DataLoader, Dataset

from meshwright.errors import CheckpointError, CollectiveError, InputError, RankError, StorageError, TrainingDiverged
from meshwright.processes.failure import (
    Failure,
    failure_from_exception,
    first_cause,
    read_record,
    repeats,
    to_error,
    write_record,
)
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.output import print_to_user
from meshwright.processes.rank import _explain
from meshwright.user.code import describe_error


@pytest.fixture
def store() -> HashStore:
    """Stands for the launcher's store."""
    return HashStore()


def fail(
    store: HashStore, folder: Path, rank: int, error: Exception, time: float, completed: int = 1, attempt: int = 0
) -> Failure:
    heartbeat = Heartbeat.in_folder(folder, rank, attempt)
    heartbeat.update(57, "backward")
    for _ in range(completed):
        heartbeat.finish_step()
    failure = dataclasses.replace(failure_from_exception(error, rank, attempt, heartbeat), time=time)
    write_record(store, failure)
    return failure


def test_records_are_read_back_for_their_attempt_only(store: HashStore, tmp_path: Path) -> None:
    failure = fail(store, tmp_path, 1, ValueError("no"), 5.0)
    assert read_record(store, 1, attempt=0) == failure
    assert read_record(store, 1, attempt=1) is None


def test_a_lost_connection_is_never_the_cause(store: HashStore, tmp_path: Path) -> None:
    fail(store, tmp_path, 0, CollectiveError("rank 0, step 57, …"), 1.0)
    later = fail(store, tmp_path, 1, ValueError("no"), 2.0)
    assert first_cause(store, tmp_path, 0, {0: 1, 1: 1}) == later


def test_the_earliest_of_equal_failures_is_the_cause(store: HashStore, tmp_path: Path) -> None:
    fail(store, tmp_path, 0, ValueError("late"), 2.0)
    early = fail(store, tmp_path, 1, ValueError("early"), 1.0)
    assert first_cause(store, tmp_path, 0, {0: 1, 1: 1}) == early


def test_a_killed_rank_is_the_cause_of_exceptions_in_others(store: HashStore, tmp_path: Path) -> None:
    fail(store, tmp_path, 0, RuntimeError("something odd"), 1.0)
    cause = first_cause(store, tmp_path, 0, {0: 1, 2: -signal.SIGKILL})
    assert cause is not None
    assert cause.line == "rank 2 was killed by SIGKILL in start-up"
    assert not cause.final


def test_an_exit_without_a_record(store: HashStore, tmp_path: Path) -> None:
    cause = first_cause(store, tmp_path, 0, {0: 0, 1: 3})
    assert cause is not None
    assert cause.line == "rank 1 exited with code 3 in start-up"
    assert cause.final


@pytest.mark.parametrize(
    ("error", "completed", "final"),
    [
        (ValueError("no"), 0, True),
        (ValueError("no"), 1, False),
        (InputError("no"), 1, True),
        (StorageError("no"), 1, True),
        (TrainingDiverged("no"), 1, True),
        (CollectiveError("no"), 0, False),
    ],
)
def test_a_failure_that_would_repeat_is_final(
    store: HashStore, tmp_path: Path, error: Exception, completed: int, final: bool
) -> None:
    assert fail(store, tmp_path, 0, error, 1.0, completed).final is final


def test_the_user_reads_the_message_and_where_the_log_is(store: HashStore, tmp_path: Path) -> None:
    error = to_error(fail(store, tmp_path, 2, ValueError("a\n  b"), 1.0), tmp_path)
    assert isinstance(error, RankError)
    assert str(error) == (f"rank 2 failed at step 57 (backward): ValueError: a b\nits log: {tmp_path / 'rank-2.log'}")
    assert "ValueError: a" in error.__notes__[0]
    ours = to_error(fail(store, tmp_path, 2, CheckpointError("the disk is full"), 1.0), tmp_path)
    assert str(ours).startswith("rank 2 failed at step 57 (backward): the disk is full\n")
    assert isinstance(to_error(fail(store, tmp_path, 2, InputError("odd"), 1.0), tmp_path), InputError)


def test_a_full_disk_is_told_in_one_line_without_a_log_that_may_be_on_it(store: HashStore, tmp_path: Path) -> None:
    error = to_error(fail(store, tmp_path, 0, StorageError("runs: the disk is full"), 1.0), tmp_path)
    assert isinstance(error, StorageError)
    assert str(error) == "rank 0 failed at step 57 (backward): runs: the disk is full"


class Unreadable(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise ValueError("13.png\nis no picture")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_users_exception_is_reported_with_its_line_also_from_a_worker(
    store: HashStore, tmp_path: Path, workers: int
) -> None:
    with pytest.raises(ValueError) as caught:
        next(iter(DataLoader(Unreadable(), num_workers=workers)))
    line = fail(store, tmp_path, 0, caught.value, 1.0).line
    assert re.search(r"ValueError: 13\.png is no picture \(test_failure\.py, line \d+\)$", line), line


def test_an_exception_that_could_not_be_sent_is_read_from_the_log(store: HashStore, tmp_path: Path) -> None:
    """A launcher that can open no more files accepts no connection."""
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    explained = _explain(error, Heartbeat.in_memory())
    assert explained is not None
    explained.__cause__ = error
    traceback = "".join(format_exception(explained))
    (tmp_path / "rank-1.log").write_text(f"--- attempt 0 ---\nTraceback (most recent call last):\n{traceback}")
    cause = first_cause(store, tmp_path, 0, {1: 1})
    assert cause is not None
    assert cause.line.startswith("rank 1 failed in start-up: a process of this rank has opened as many files")
    assert "ulimit -n" in cause.line


def test_an_abort_by_the_watchdog_of_nccl_is_a_timeout(store: HashStore, tmp_path: Path) -> None:
    heartbeat = Heartbeat.in_folder(tmp_path, 0, 0)
    heartbeat.update(57, "backward")
    (tmp_path / "rank-0.log").write_text(
        "--- attempt 0, process 7, … ---\n[rank0]:[E ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught"
        " collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=8, NumelOut=8,"
        " Timeout(ms)=30000) ran for 30010 milliseconds before timing out.\n"
    )
    cause = first_cause(store, tmp_path, 0, {0: -signal.SIGABRT})
    assert cause is not None
    assert cause.kind == "CollectiveError"
    assert cause.line == "rank 0, step 57, allreduce (backward): no answer within 30 s"


def test_a_repeated_failure_is_not_worth_another_restart(store: HashStore, tmp_path: Path) -> None:
    late = CollectiveError("rank 0, step 57, all-reduce (backward): no answer within 6 s; rank 1 was last seen …")
    broken = CollectiveError("rank 0, step 57, all-reduce (backward): the connection broke")
    odd, even = ValueError("odd"), ValueError("even")

    def is_repeated(error: Exception, previous: Exception) -> bool:
        return repeats(fail(store, tmp_path, 0, error, 2.0, attempt=1), fail(store, tmp_path, 1, previous, 1.0))

    assert is_repeated(odd, odd)
    assert is_repeated(late, late)
    assert not is_repeated(odd, even)
    assert not is_repeated(broken, broken)
    assert not is_repeated(late, broken)
    assert not repeats(fail(store, tmp_path, 0, odd, 1.0), None)


def test_what_a_terminal_would_obey_is_shown_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = ValueError("gone \x1b[2J\x1b]0;title\x07 \u202e\r\nnext")
    failure = failure_from_exception(hostile, 0, 0, Heartbeat.in_memory())
    print_to_user(failure.line)
    print_to_user(f"told as it is: {hostile}")
    shown = describe_error(hostile) + failure.line + capsys.readouterr().err.replace("\n", "")
    assert shown.isprintable()
    assert shown.count(r"gone \x1b[2J\x1b]0;title\x07 \u202e") == 4
