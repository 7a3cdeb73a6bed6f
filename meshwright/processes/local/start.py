"""What a forked process does as a rank: it redirects its output and ties itself to its parent, then imports the rank's
module and calls its `main()`. The import comes last, so that a failing import is reported too."""

import importlib
import mmap
import signal
import sys
from typing import NoReturn

from meshwright.processes import environment
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.output import redirect
from meshwright.processes.process_exit import exit_forked_process, exit_with_parent, record_failure_and_exit


def run(finished: mmap.mmap, module: str, *arguments: str) -> NoReturn:
    """Runs the rank and ends the process. The byte `finished` is set when `main()` has returned."""
    env = environment.read_environment()
    assert env.fork_server_pid is not None
    exit_with_parent(env.fork_server_pid)
    # The launcher handles Ctrl-C, and stops the ranks with SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.argv = [module, *arguments]
    try:
        if env.folder is not None:
            redirect(env.folder, env.rank, env.attempt, env.speaker)
        importlib.import_module(module).main()
    except BaseException as error:
        record_failure_and_exit(error, env, Heartbeat.in_memory())
    finished[0] = 1
    exit_forked_process()
