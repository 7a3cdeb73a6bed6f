"""Starts a fixed number of ranks. If one fails, the others are ended."""

import os
import time

from meshwright.compat.horovod.launcher.arguments import LaunchOptions
from meshwright.compat.horovod.launcher.worker_process import (
    WorkerProcess,
    rank_variables,
    shared_variables,
    show_output,
)
from meshwright.errors import RankError
from meshwright.processes.failure import signal_name
from meshwright.processes.local.rank_output import Screen
from meshwright.processes.loopback import serve_store

_POLL_S = 0.1
_GRACE_S = 3.0  # how long other ranks may go on to print why, after a rank has failed


def run_static(options: LaunchOptions) -> None:
    """Runs the command on all ranks. Raises `RankError` about the ranks that fail."""
    store, port = serve_store()
    threads = max(1, (os.cpu_count() or 1) // options.np)
    shared = {**shared_variables(port, options.np, threads), **options.variables}
    screen = Screen()
    workers: list[WorkerProcess] = []
    try:
        for rank in range(options.np):
            variables = {**shared, **rank_variables(rank, options.np)}
            workers.append(WorkerProcess(options.command, rank, variables, screen, options.output_folder))
        deadline = float("inf")
        while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
            show_output(workers, _POLL_S)
            if deadline == float("inf") and any(worker.poll() for worker in workers):
                deadline = time.monotonic() + _GRACE_S
    finally:
        failed = [worker for worker in workers if worker.poll()]  # without those that are ended here
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.close()
        screen.end_lines()
    del store  # the ranks needed it until here
    if failed:
        ends = (f"rank {worker.number} of {options.np} {describe_exit(worker.poll() or 0)}" for worker in failed)
        raise RankError("; ".join(ends))


def describe_exit(code: int) -> str:
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
