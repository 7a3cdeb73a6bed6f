"""`python -m meshwright.launch.local.start MODULE ARGUMENTS` is the program that a rank runs. It prepares the process
before anything slow is imported, so that a failing import is reported too and no rank outlives its launcher."""

import runpy
import signal
import sys

from meshwright.launch import environment
from meshwright.launch.heartbeat import Heartbeat
from meshwright.launch.output import redirect
from meshwright.launch.process_exit import exit_with_agent, record_failure_and_exit, skip_library_teardown


def main() -> None:
    env = environment.read_environment()
    exit_with_agent(env)
    # The launcher handles Ctrl-C, and stops the ranks with SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if env.folder is not None:
        redirect(env.folder, env.rank, env.attempt, env.speaker)
    module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    try:
        with skip_library_teardown():
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit:
        raise
    except BaseException as error:
        record_failure_and_exit(error, env, Heartbeat.in_memory())


if __name__ == "__main__":
    main()
