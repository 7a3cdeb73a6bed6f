"""Runs a function in several ranks for a test: file rendezvous, Gloo on loopback, one thread each, a time limit.
On a GPU, one rank may have NCCL.

`run_ranks(function, 2, *args)` runs one function; `with ranks(2) as pool: pool.run(function, *args)` many. Functions
live at module level and are called as `function(rank, world_size, *args)`. Starting ranks takes longer than most tests:
worlds of a size are kept for all tests of a process.
"""

import atexit
import faulthandler
import multiprocessing
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
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_SETTLE_S = 1.0  # how long the other ranks may take to tell the cause of a broken connection


_KEPT_UP_TO = 4


class RankFailure(RuntimeError):
    """A rank raised: the text holds its traceback."""


class RankPool:
    """Runs one function after another in one world; a failure ends it, and the next call starts a new one."""

    def __init__(self, world_size: int, timeout_s: float = 120, backend: str = "gloo") -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.backend = backend
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: Path | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results by rank."""
        if not all(process.is_alive() for process in self._processes):
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
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        rendezvous = str(self._folder / "store")
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when it is imported
        try:
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(rank, self.world_size, rendezvous, self.timeout_s, self.backend, theirs),
                    name=f"rank {rank} of {self.world_size}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        finally:
            os.environ.pop("OMP_NUM_THREADS")
            if before is not None:
                os.environ["OMP_NUM_THREADS"] = before

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
            # A broken connection is what the others see of the rank that failed first.
            raise RankFailure(next((text for text in failed if "gloo" not in text), failed[0]))

    def _receive(self, rank: int, pipe: Connection) -> tuple[bool, Any]:
        try:
            good, result = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            process = self._processes[rank]
            process.join(_SETTLE_S)
            return False, f"it died with exit code {process.exitcode}"
        return good, result

    def _show_stacks(self, stuck: list[int]) -> None:
        for rank in stuck:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)  # nothing tells when they have printed


_KEPT: dict[tuple[int, str], RankPool] = {}


@atexit.register
def _close_kept() -> None:
    for pool in _KEPT.values():
        pool.close()


@contextmanager
def ranks(world_size: int, timeout_s: float = 120, backend: str = "gloo") -> Iterator[RankPool]:
    """A world of that size; `timeout_s` holds for each call. Small ones stay for whoever wants one next."""
    if world_size > _KEPT_UP_TO:
        pool = RankPool(world_size, timeout_s, backend)
        try:
            yield pool
        finally:
            pool.close()
        return
    kept = _KEPT.setdefault((world_size, backend), RankPool(world_size, timeout_s, backend))
    before, kept.timeout_s = kept.timeout_s, timeout_s
    try:
        yield kept
    finally:
        kept.timeout_s = before


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """What `function(rank, world_size, *args)` returns in each rank."""
    with ranks(world_size, timeout_s) as pool:
        return pool.run(function, *args)


def _serve(rank: int, world_size: int, rendezvous: str, timeout_s: float, backend: str, pipe: Connection) -> None:
    faulthandler.register(signal.SIGUSR1)
    try:
        _join(rank, world_size, rendezvous, timeout_s, backend)
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

    from meshwright.launch.loopback import interface

    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(0)  # that all of them share
    os.environ["GLOO_SOCKET_IFNAME"] = interface()
    dist.init_process_group(
        backend,
        store=dist.FileStore(rendezvous, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    # One mesh of a shape for all tests, for whoever imports this function from now on: each has groups with threads of
    # their own, which those of hundreds of tests would keep the cores busy with, and which may not be ended, since
    # PyTorch keeps meshes for equal ones to come.
    setattr(device_mesh, "init_device_mesh", cache(device_mesh.init_device_mesh))  # noqa: B010


def _answer(function: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...]) -> bytes:
    """Plain pickle, by value: torch's pickling for pipes would hand over memory that dies with this process."""
    try:
        return pickle.dumps((True, function(rank, world_size, *args)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
