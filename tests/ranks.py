"""Runs a function in several ranks for a test: file rendezvous, Gloo on loopback, one thread each, a time limit. One
rank on a GPU may use NCCL.

`run_ranks(function, 2, *args)` runs one function; `with ranks(2) as pool: pool.run(function, *args)` runs many.
Functions are defined at module level and called as `function(rank, world_size, *args)`. Starting ranks takes longer
than most tests, so small pools are shared by all tests of a process.
"""

import atexit
import faulthandler
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from meshwright.processes.local.fork_server import ForkedRank
from tests.forking import environment
from tests.forking.forked import fork, take_standard_input

_SETTLE_S = 1.0  # how long the other ranks may take to report the cause of a broken connection
_LARGEST_SHARED = 4  # ranks of the largest pool that tests share
# A process group of Gloo has threads that use a core now and then, also when nobody sends anything. A pool whose tests
# have made many groups is ended after their module; forking new ranks costs less.
_MOST_IDLE_THREADS = 40
# By the beginning of the name of the module whose functions ranks run, a module that imports a large library. It is
# imported once, in the process that ranks are forked from.
_IMPORTED_FOR = {
    "tests.compat.accelerate.": "tests.compat.accelerate.loops",
    "tests.compat.lightning.": "tests.compat.lightning.trainers",
    "validation.fuzz.": "validation.fuzz.training.warm",
    **dict.fromkeys(
        (
            "tests.compat.transformers.",
            "tests.proof.models.",
            "tests.train.callbacks.test_page",
            "tests.train.loops.test_adapters",
            "tests.train.runs.test_bf16_weights",
        ),
        "tests.compat.transformers.trainers",
    ),
}


class RankFailure(RuntimeError):
    """A rank raised an exception; the text contains its traceback."""


class RankPool:
    """Runs one function after another in the same processes. After a failure they are ended, and the next call starts
    new ones."""

    def __init__(self, world_size: int, timeout_s: float = 120, backend: str = "gloo") -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.backend = backend
        self._imported: str | None = None
        self._processes: list[ForkedRank] = []
        self._pipes: list[Connection] = []
        self._folder: Path | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Returns the results by rank."""
        module = getattr(function, "__module__", "")
        imported = next((name for start, name in _IMPORTED_FOR.items() if module.startswith(start)), None)
        if imported not in (None, self._imported):
            self.close()
            self._imported = imported
        if not all(process.poll() is None for process in self._processes):
            self.close()
        if not self._processes:
            self._start()
        work = pickle.dumps((function, args))
        answers: dict[int, tuple[bool, Any]] = {}
        try:
            for pipe in self._pipes:
                pipe.send_bytes(work)
            self._collect(answers, time.monotonic() + self.timeout_s)
        except BaseException:
            self.close()
            raise
        return [answers[rank][1] for rank in range(self.world_size)]

    def close(self) -> None:
        for process in self._processes:
            process.signal_group(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes, self._folder = [], [], None

    def thread_count(self) -> int:
        """Returns the number of threads of rank 0; 0 where no ranks run."""
        tasks = [Path(f"/proc/{process.pid}/task") for process in self._processes[:1]]
        return sum(1 for folder in tasks if folder.exists() for _ in folder.iterdir())

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        settings = [str(self.world_size), str(self._folder / "store"), str(self.timeout_s), self.backend]
        for rank in range(self.world_size):
            pipe, rank_pipe = Pipe()
            # Neither variables nor folder are those of the test that happens to be the first to use the pool.
            process = fork(
                "tests.ranks:serve",
                *(str(rank), *settings),
                stdin=rank_pipe.fileno(),
                variables=environment.AT_START,
                folder=str(environment.REPOSITORY),
                imported=self._imported,
            )
            rank_pipe.close()
            self._processes.append(process)
            self._pipes.append(pipe)

    def _collect(self, answers: dict[int, tuple[bool, Any]], deadline: float) -> None:
        failed: list[str] = []
        waiting = dict(zip(self._pipes, range(self.world_size), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready and not failed:
                self._show_stacks(list(waiting.values()))
                raise TimeoutError(f"ranks {sorted(waiting.values())} gave no answer in {self.timeout_s} s")
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                answers[rank] = self._receive(rank, pipe)
                if not answers[rank][0]:
                    failed.append(f"rank {rank} of {self.world_size} failed:\n{answers[rank][1]}")
                    deadline = min(deadline, time.monotonic() + _SETTLE_S)
        if failed:
            # The others report a broken connection when the first rank fails.
            raise RankFailure(next((text for text in failed if "gloo" not in text), failed[0]))

    def _receive(self, rank: int, pipe: Connection) -> tuple[bool, Any]:
        try:
            succeeded, result = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return False, f"it died with exit code {self._processes[rank].wait(_SETTLE_S)}"
        return succeeded, result

    def _show_stacks(self, stuck: list[int]) -> None:
        for rank in stuck:
            if self._processes[rank].poll() is None:
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)  # there is no signal when they have printed


_SHARED_POOLS: dict[tuple[int, str], RankPool] = {}


@atexit.register
def _close_shared_pools() -> None:
    for pool in _SHARED_POOLS.values():
        pool.close()


def shared_rank_ids() -> set[int]:
    """The processes of the shared pools, which stay until the tests end."""
    return {process.pid for pool in _SHARED_POOLS.values() for process in pool._processes}


@contextmanager
def ranks(world_size: int, timeout_s: float = 120, backend: str = "gloo") -> Iterator[RankPool]:
    """Yields a pool of this size; `timeout_s` is the time limit of each call. Small pools are shared by tests."""
    if world_size > _LARGEST_SHARED:
        pool = RankPool(world_size, timeout_s, backend)
        try:
            yield pool
        finally:
            pool.close()
        return
    shared = _SHARED_POOLS.setdefault((world_size, backend), RankPool(world_size, timeout_s, backend))
    previous, shared.timeout_s = shared.timeout_s, timeout_s
    try:
        yield shared
    finally:
        shared.timeout_s = previous
        if shared.thread_count() > _MOST_IDLE_THREADS:
            shared.close()


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """Returns the results of `function(rank, world_size, *args)` by rank."""
    with ranks(world_size, timeout_s) as pool:
        return pool.run(function, *args)


def serve(*settings: str) -> None:
    """What the process of a rank does. Its end of the pipe is its standard input."""
    rank, world_size, (rendezvous, timeout_s, backend) = int(settings[0]), int(settings[1]), settings[2:]
    pipe = Connection(take_standard_input())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    try:
        _join(rank, world_size, rendezvous, float(timeout_s), backend)
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        return
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return  # the pool is gone
        except BaseException:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
            continue
        pipe.send_bytes(_answer(function, rank, world_size, args))


def _join(rank: int, world_size: int, rendezvous: str, timeout_s: float, backend: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import device_mesh

    from meshwright.processes.loopback import interface

    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(0)  # all ranks share it
    os.environ["GLOO_SOCKET_IFNAME"] = interface()
    dist.init_process_group(
        backend,
        store=dist.FileStore(rendezvous, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    # All tests share one mesh of each shape. A mesh has process groups with threads of their own, and those of hundreds
    # of tests would keep the cores busy. They must not be destroyed, because PyTorch reuses meshes of equal shape.
    setattr(device_mesh, "init_device_mesh", cache(device_mesh.init_device_mesh))  # noqa: B010


def enable_onednn() -> None:
    """Lets torch use oneDNN again, which a test may have ended: on CPUs without instructions for bf16, torch uses no
    kernel of oneDNN any more after the first product in bf16 of a process. Results in fp32 then have other bits than
    those of a new process."""
    import torch

    torch._C._set_mkldnn_enabled(torch.backends.mkldnn.is_available())


def _answer(function: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...]) -> bytes:
    """Returns the pickled result. It is pickled by value, because torch's own pickling for pipes would pass shared
    memory that ends with this process."""
    enable_onednn()
    try:
        return pickle.dumps((True, function(rank, world_size, *args)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
