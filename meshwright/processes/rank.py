"""Runs a function as a rank: redirects its output to the log, joins the process group, and records a failure."""

import errno
import os
import re
import resource
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import torch

from meshwright.errors import CollectiveError, MeshwrightError, OutOfMemory, RankError, UserCodeError, chain_of
from meshwright.processes import environment
from meshwright.processes.communication_errors import explain_communication_error
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.output import redirect, terminal
from meshwright.processes.process_exit import record_failure_and_exit
from meshwright.processes.stall.collection import Finding
from meshwright.processes.stall.out_of_memory import describe_out_of_memory, is_out_of_memory
from meshwright.processes.stall.watchdog import Watchdog, make_watchdog
from meshwright.processes.world import World, join, leave
from meshwright.user.code import describe_error, exits_become_errors, user_position

# What torch says when a worker process of a DataLoader has died. It may say so in the middle of any function.
_DEAD_WORKER = re.compile(r"^DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) ((?:is killed|exited)[^.]*)")


def run_rank(
    main: Callable[[World, Heartbeat], None],
    device: str,
    timeout_s: float,
    join: Callable[[str, float], World] = join,
    end: Callable[[BaseException, environment.Environment, Heartbeat], NoReturn] = record_failure_and_exit,
) -> None:
    """Runs `main` as the rank that the environment variables describe. `join` connects to the other ranks. If `main`
    fails, `end` is called, which records the failure and ends the process; in a process that no launcher started, the
    exception is raised instead."""
    env = environment.read_environment()
    if not env.launched:
        main(join(device, timeout_s), Heartbeat.in_memory())
        return
    heartbeat = Heartbeat.in_memory(env.attempt)
    world = World(env.rank, env.local_rank, env.size, env.local_size, env.attempt, torch.device("cpu"), None)
    watchdog: Watchdog | None = None
    try:
        if env.folder is not None:
            redirect(env.folder, env.rank, env.attempt, env.speaker)
            heartbeat.move_to(env.folder, env.rank)
        world = join(device, timeout_s)
        watchdog = _start_watchdog(world, heartbeat, timeout_s, lambda error: end(error, env, heartbeat))
        with exits_become_errors():
            main(world, heartbeat)
        if watchdog is not None:
            watchdog.close()
        leave()
    except BaseException as error:
        explained = _explain(error, heartbeat) or explain_communication_error(
            error, world, heartbeat, timeout_s, heartbeat.folder, watchdog
        )
        if explained is not None and explained is not error:
            explained.__cause__ = error
        # The number in the process group, by which the logs are named; a launcher may have given another one.
        end(explained or error, replace(env, rank=world.rank), heartbeat)


def _start_watchdog(
    world: World, heartbeat: Heartbeat, timeout_s: float, end: Callable[[BaseException], object]
) -> Watchdog | None:
    """Starts the watchdog of this rank. If it finds that no rank makes progress, it tells the user, and the run goes
    on. `end` is called if a thread of a library ends the process."""

    def tell(finding: Finding) -> None:
        where = f"; the report of all ranks: {finding.report}" if finding.report else ""
        print(f"warning: {finding.line}{where}", file=terminal(), flush=True)

    def end_with(finding: Finding) -> None:
        error = CollectiveError(finding.line)
        error.report = str(finding.report) if finding.report else None
        end(error)

    return make_watchdog(world, world.store, heartbeat, timeout_s, tell, end_with)


def has_no_files_left(error: BaseException | None) -> bool:
    """Whether the cause of an exception is the limit of open files (`ulimit -n`). Torch says so in a text only."""
    full = os.strerror(errno.EMFILE)
    return any(getattr(raised, "errno", None) == errno.EMFILE or full in str(raised) for raised in chain_of(error))


def _explain(error: BaseException, heartbeat: Heartbeat) -> MeshwrightError | None:
    """Returns an error in words for an exception of the user's code that has no message or a misleading one, for memory
    that is full, and for the death of a process that loads data. Returns None for other exceptions."""
    if has_no_files_left(error):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return RankError(
            f"a process of this rank has opened as many files and connections as it may, {limit}: raise the limit with"
            " ulimit -n before the run, or use fewer ranks or data.workers"
        )
    if is_out_of_memory(error):
        return OutOfMemory(describe_out_of_memory(error, heartbeat))
    if isinstance(error, UserCodeError):
        return error
    if isinstance(error, (StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt)) and user_position(error):
        return UserCodeError(describe_error(error))
    dead_worker = _DEAD_WORKER.search(str(error))
    if dead_worker is None:
        return None
    processes, end = dead_worker[1], dead_worker[2].replace("is killed", "was killed").strip()
    return RankError(
        f"a data loader worker (process {processes}) {end}: lower data.workers if memory ran out; with data.workers 0,"
        " an error in the data set's code is shown"
    )
