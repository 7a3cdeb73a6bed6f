import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import connection, reduction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from meshwright.data import workers
from meshwright.data.loading import LoadingOptions, SampleShare, train_batches
from meshwright.errors import RankError
from tests.data.sources import Augmented, Stream, as_list
from tests.forking.forked import fork
from tests.processes.processes import wait_until
from tests.soaked import all_but

DEADLINE_S = 30


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_processes_end(pids: list[int]) -> None:
    end = time.monotonic() + DEADLINE_S
    while remaining := [pid for pid in pids if running(pid)]:
        assert time.monotonic() < end, f"still running: {remaining}"
        time.sleep(0.02)


def endless(dataset: Any) -> Any:
    loading = LoadingOptions(workers=2, collate=as_list)
    return train_batches(dataset, seed=0, global_batch=2, share=SampleShare(), loading=loading)


def child_processes() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid}


def started_workers(batches: Any) -> list[int]:
    """Takes the first batch and returns the process ids of the workers that this started. Other tests of this process
    may have children too."""
    before = child_processes()
    next(batches)
    return sorted(child_processes() - before)


@pytest.mark.parametrize("dataset", [Augmented(100), Stream(100)])
@pytest.mark.parametrize("ending", ["closed", "dropped"])
def test_workers_end_with_their_iterator(dataset: Any, ending: str) -> None:
    batches = endless(dataset)
    pids = started_workers(batches)
    assert len(pids) == 2
    if ending == "closed":
        batches.close()
    del batches
    assert_processes_end(pids)


def test_workers_survive_signals_to_the_process_group() -> None:
    batches = endless(Augmented(1000))
    pids = started_workers(batches)
    for number in ("INT", "TERM"):  # from a process that is not their rank, as a scheduler or a terminal is
        subprocess.run(["kill", f"-{number}", *map(str, pids)], check=True)
    for _ in range(20):  # more than the workers had prefetched
        next(batches)
    assert all(running(pid) for pid in pids)
    batches.close()


def test_workers_survive_signals_while_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    start_worker = workers._start_worker

    def signal_before_start(worker: int) -> None:
        for number in ("INT", "TERM"):
            subprocess.run(["kill", f"-{number}", str(os.getpid())], check=True)
        start_worker(worker)

    monkeypatch.setattr(workers, "_start_worker", signal_before_start)
    batches = endless(Augmented(100))
    pids = started_workers(batches)
    for _ in range(20):
        next(batches)
    assert len(pids) == 2
    assert all(running(pid) for pid in pids)
    batches.close()


ENDS: dict[str, Callable[[], object]] = {
    "returns": lambda: None,
    "raises": lambda: sys.exit(3),
    "waits": signal.pause,
}


def rank_with_workers(end: str) -> None:
    batches = endless(Slow())
    next(batches)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    ENDS[end]()


class Slow(Dataset[Any]):
    """The first two samples come at once, the next one only after the time limit of this test."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> bytes:
        count = getattr(self, "count", 0)
        self.count = count + 1
        if count >= 2:
            time.sleep(10 * DEADLINE_S)
        return bytes(200_000)  # more than a pipe holds: a worker blocked on a pipe that nobody reads must end too


@pytest.mark.parametrize("end", all_but({"waits"}, ENDS))
def test_busy_workers_end_with_their_rank(end: str) -> None:
    read_end, write_end = os.pipe()
    with open(os.devnull) as nothing, open(read_end) as output:
        rank = fork("tests.data.test_workers:rank_with_workers", end, stdin=nothing.fileno(), stdout=write_end)
        os.close(write_end)
        pids = [int(pid) for pid in output.readline().split()]
        assert len(pids) == 2
        if end == "waits":
            os.kill(rank.pid, signal.SIGKILL)
        rank.wait(timeout=DEADLINE_S)
        assert_processes_end(pids)


class Stuck(Dataset[int]):
    """Sample 5 is never read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        while index == 5:
            signal.pause()
        return index


def test_a_worker_that_hangs_is_named_and_ended() -> None:
    loading = LoadingOptions(workers=2, timeout_s=3)  # workers may take as long to start where cores are busy
    share = SampleShare()
    before = child_processes()
    batches = train_batches(Stuck(), seed=0, global_batch=2, share=share, loading=loading)
    first = next(batches)
    pids = sorted(child_processes() - before)
    assert first.samples == 2
    with pytest.raises(RankError, match=r"^worker [01] of 2 that load data has not answered within 3 s \(data"):
        for _ in batches:
            pass
    assert_processes_end(pids)


def stop_while_a_tensor_is_handed_over() -> None:
    setattr(reduction, "send_handle", stop_in_the_data_set)  # noqa: B010


def stop_after_half_of_a_message() -> None:
    def send_half(self: Any, content: Any) -> None:
        os.write(self.fileno(), len(content).to_bytes(4, "big") + bytes(content[: len(content) // 2]))
        stop_in_the_data_set()

    setattr(connection.Connection, "_send_bytes", send_half)  # noqa: B010


def stop_in_the_data_set(*_: Any) -> None:
    while True:
        os.kill(os.getpid(), signal.SIGSTOP)


STOPS = [stop_while_a_tensor_is_handed_over, stop_after_half_of_a_message, stop_in_the_data_set]


class Stopped(Dataset[torch.Tensor]):
    """The worker that reads sample 5 stops at a moment that `stop` chooses."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self.stop = stop

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            self.stop()
        return torch.tensor(index)


@pytest.mark.parametrize("stop", STOPS)
def test_a_worker_that_is_stopped_at_any_moment_is_named_and_ended(stop: Callable[[], None]) -> None:
    loading = LoadingOptions(workers=2, timeout_s=3)
    before = child_processes()
    batches = train_batches(Stopped(stop), seed=0, global_batch=2, share=SampleShare(), loading=loading)
    with pytest.raises(RankError, match=r"^worker [01] of 2 .* within 3 s \(data.timeout_s\): a signal or a"):
        for _ in batches:
            pass
    wait_until(lambda: child_processes() <= before, "the workers have ended")


def test_one_thread_limits_all_batches_and_no_pause_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    monkeypatch.setattr(workers, "_TORCH_FIRST_S", 0.0)
    monkeypatch.setattr(workers._TimeLimit, "_end_the_read", lambda limit: ended.append(limit))
    before = threading.active_count()
    limit = workers._TimeLimit(None, LoadingOptions(workers=1, timeout_s=1))
    for _ in range(50):
        with limit:
            pass
    assert threading.active_count() <= before + 1
    time.sleep(1.5)
    assert not ended
    with limit:
        wait_until(lambda: bool(ended), "the time is over")
    limit.close()
    assert ended == [limit]
