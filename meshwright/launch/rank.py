"""Runs a function as a rank: redirects its output to the log, joins the process group, and records a failure."""

from collections.abc import Callable

import torch

from meshwright.launch import environment
from meshwright.launch.communication_errors import explain_communication_error
from meshwright.launch.heartbeat import Heartbeat
from meshwright.launch.output import redirect
from meshwright.launch.process_exit import record_failure_and_exit
from meshwright.launch.world import World, join, leave


def run_rank(
    main: Callable[[World, Heartbeat], None],
    device: str,
    timeout_s: float,
    join: Callable[[str, float], World] = join,
) -> None:
    """Runs `main` as the rank that the environment variables describe. `join` connects to the other ranks. If `main`
    fails, the failure is recorded and the process ends; in a process that no launcher started, the exception is raised
    instead."""
    env = environment.read_environment()
    if not env.launched:
        main(join(device, timeout_s), Heartbeat.in_memory())
        return
    if env.folder is not None:
        redirect(env.folder, env.rank, env.attempt, env.speaker)
        heartbeat = Heartbeat.in_folder(env.folder, env.rank, env.attempt)
    else:
        heartbeat = Heartbeat.in_memory(env.attempt)
    world = World(env.rank, env.local_rank, env.size, env.local_size, env.attempt, torch.device("cpu"), None)
    try:
        world = join(device, timeout_s)
        main(world, heartbeat)
        leave()
    except SystemExit:
        raise
    except BaseException as error:
        explained = explain_communication_error(error, world, heartbeat, timeout_s, heartbeat.folder)
        if explained is not None and explained is not error:
            explained.__cause__ = error
        record_failure_and_exit(explained or error, env, heartbeat)
