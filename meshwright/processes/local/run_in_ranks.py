"""Calls a function in new ranks for `mw.launch`: starts the ranks, shows what they print, and returns rank 0's value or
raises an error about the rank that failed first."""

import json
import linecache
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from meshwright.errors import RankError
from meshwright.processes import loopback
from meshwright.processes.failure import UNFINISHED, signal_name
from meshwright.processes.local.called_rank import Preparation, Report
from meshwright.processes.local.fork_server import ForkedRank, ForkServer, kept_fork_server
from meshwright.processes.local.function_pickle import name_of, pickle_call, unpickle_value
from meshwright.processes.local.rank_output import RankStream, Screen

# What the fork server imports: most functions use it. It is imported by name, because it lies above this package.
_PRELOADED = "meshwright.train.parallelize"
_RANK = "meshwright.processes.local.called_rank"
_POLL_S = 0.1
_EXIT_POLL_S = 0.02
_GRACE_S = 2.0  # how long other ranks may go on after a rank has failed
_EXIT_S = 30.0  # how long a rank may take to exit when all calls have returned


@dataclass(eq=False)
class _Rank:
    """A rank, and what connects it to this process. `report` is None until its call has ended, `exit_code` is None
    unless it died before; `end_s` is the time of either. `pickled_value` is what the call returned in rank 0."""

    number: int
    process: ForkedRank
    connection: Connection
    streams: list[RankStream]
    report: Report | None = None
    pickled_value: bytes | None = None
    exit_code: int | None = None
    end_s: float = 0.0

    @property
    def is_running(self) -> bool:
        return self.report is None and self.exit_code is None

    @property
    def has_failed(self) -> bool:
        return self.exit_code is not None or (self.report is not None and self.report.error is not None)


def run_in_ranks(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    count: int,
    device: str,
    timeout_s: float | None,
) -> Any:
    """Returns what the function returns in rank 0 of `count` new ranks. Raises a `RankError` about the rank that failed
    first, or about the ranks that have not returned after `timeout_s`; None means no limit."""
    call = pickle_call(function, args, kwargs)
    preparation = json.dumps(asdict(_preparation(device))).encode()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    store, port = loopback.serve_store()
    with kept_fork_server(_PRELOADED) as server, _started(server, count, _variables(count, port, device)) as ranks:
        for rank in ranks:
            _send_call(rank, preparation, call)
        _wait_for_reports(ranks, deadline)
        _raise_first_failure(ranks, name_of(function))
        if late := [str(rank.number) for rank in ranks if rank.is_running]:
            raise RankError(
                f"{name_of(function)} did not return within timeout_s={timeout_s} in ranks {', '.join(late)}"
            )
        _let_exit(ranks)
        pickled = ranks[0].pickled_value
    del store  # the ranks needed it until here
    assert pickled is not None
    return unpickle_value(pickled)


def _preparation(device: str) -> Preparation:
    # Sources of interactive input have no time of last change, and no file that ranks could read.
    interactive = {file: entry for file, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    cells = {file: "".join(entry[2]) for file, entry in interactive.items()}
    return Preparation([str(folder) for folder in sys.path], list(sys.argv), os.getcwd(), cells, device)


def _variables(count: int, port: int, device: str) -> dict[str, str]:
    """Returns the environment variables of all ranks: those that torchrun sets, for a store that this process serves on
    the loopback address."""
    interface = loopback.interface()
    threads = str(max(1, torch.get_num_threads() // count))
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": loopback.ADDRESS,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "meshwright",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # otherwise rank 0 would serve a store on every interface
        # Local ranks need no other machine, and must not be reachable from one.
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
    }


@contextmanager
def _started(server: ForkServer, count: int, environment: Mapping[str, str]) -> Iterator[list[_Rank]]:
    """Starts the ranks. At the end of the context those that still run are killed, with the processes that they have
    started, and what the ranks have printed by then is shown."""
    ranks: list[_Rank] = []
    screen = Screen()
    try:
        for number in range(count):
            ranks.append(_start(server, number, environment, screen))
        yield ranks
    finally:
        for rank in ranks:
            rank.connection.close()  # ends a rank that is too new to have a process group that could get a signal
            rank.process.signal_group(signal.SIGKILL)
        for rank in ranks:
            rank.process.wait()
            for stream in rank.streams:
                stream.close()
        screen.end_lines()


def _start(server: ForkServer, number: int, environment: Mapping[str, str], screen: Screen) -> _Rank:
    ours, theirs = socket.socketpair()
    pipes = {stream: os.pipe() for stream in (1, 2)}
    names = {"RANK": str(number), "LOCAL_RANK": str(number)}
    try:
        streams = {0: theirs.fileno(), **{stream: write_end for stream, (_, write_end) in pipes.items()}}
        process = server.start_rank(_RANK, [], {**environment, **names}, streams)
    except BaseException:
        ours.close()
        for read_end, _ in pipes.values():
            os.close(read_end)
        raise
    finally:
        theirs.close()
        for _, write_end in pipes.values():
            os.close(write_end)
    shown = [RankStream(number, stream, read_end, screen) for stream, (read_end, _) in pipes.items()]
    return _Rank(number, process, Connection(ours.detach()), shown)


def _send_call(rank: _Rank, preparation: bytes, call: bytes) -> None:
    try:
        rank.connection.send_bytes(preparation)
        rank.connection.send_bytes(call)
    except OSError:
        pass  # the rank has died, which `_wait_for_reports` sees


def _wait_for_reports(ranks: list[_Rank], deadline: float | None) -> None:
    """Returns when every call has ended; or a moment after one has failed; or at the deadline."""
    next_poll = time.monotonic() + _POLL_S
    while running := [rank for rank in ranks if rank.is_running]:
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            return
        ready = _show_output(ranks, [rank.connection for rank in running], _POLL_S)
        for rank in [rank for rank in running if rank.connection in ready]:
            _receive_report(rank)
        if now > next_poll:
            # A dead rank's connection stays open if a process that it had forked lives on.
            for rank in [rank for rank in running if rank.is_running and rank.process.poll() is not None]:
                _receive_report(rank)
            next_poll = now + _POLL_S
        if any(rank.has_failed for rank in running):
            grace_end = time.monotonic() + _GRACE_S
            deadline = grace_end if deadline is None else min(deadline, grace_end)


def _show_output(ranks: list[_Rank], connections: list[Connection], timeout_s: float) -> list[Any]:
    """Waits until a rank has printed something or a connection has a message, shows the output, and returns the objects
    that were ready."""
    sources: list[Any] = [*connections, *(stream for rank in ranks for stream in rank.streams)]
    ready = wait(sources, timeout_s)
    for rank in ranks:
        for stream in [stream for stream in rank.streams if stream in ready]:
            if not stream.show():
                stream.close()
                rank.streams.remove(stream)
    return ready


def _receive_report(rank: _Rank) -> None:
    """Receives how the call has ended or, if the rank has died, its exit code."""
    try:
        if rank.process.poll() is not None and not rank.connection.poll():
            raise EOFError
        report = Report(**json.loads(rank.connection.recv_bytes()))
        if rank.number == 0 and report.error is None:
            rank.pickled_value = rank.connection.recv_bytes()
        rank.report = report
    except (EOFError, OSError):
        rank.exit_code = _exit_code(rank.process)
    rank.end_s = time.monotonic()


def _exit_code(process: ForkedRank) -> int:
    """Returns the exit code of a rank that has closed its connection. It does not reap the process, so that processes
    which the rank had started can still be killed with its process group."""
    deadline = time.monotonic() + _GRACE_S
    while (code := process.poll()) is None and time.monotonic() < deadline:
        time.sleep(_EXIT_POLL_S)
    return UNFINISHED if code is None else code


def _raise_first_failure(ranks: list[_Rank], function: str) -> None:
    """Raises an error about the rank that failed first. Errors of communication come last, because the death of another
    rank causes them, and may be seen later. Does nothing if no rank has failed."""
    failed = [rank for rank in ranks if rank.has_failed]
    if not failed:
        return
    first = min(failed, key=lambda rank: (rank.report is not None and rank.report.is_consequence, rank.end_s))
    who = f"rank {first.number} of {len(ranks)}"
    if first.report is not None:
        raise RankError(f"{who} failed: {first.report.error}\n\n{first.report.traceback}".rstrip())
    assert first.exit_code is not None
    raise RankError(f"{who} {_describe_exit(first.exit_code)} before {function} had returned")


def _describe_exit(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL, which the system also sends when memory runs out,"
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    return f"ended with exit code {0 if code == UNFINISHED else code}"


def _let_exit(ranks: list[_Rank]) -> None:
    """Tells the ranks that all calls have returned, and shows what they print until they exit."""
    for rank in ranks:
        rank.connection.close()
    deadline = time.monotonic() + _EXIT_S
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
        _show_output(ranks, [], _EXIT_POLL_S)
