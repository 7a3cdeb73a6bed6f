"""`python -m meshwright.launch.start MODULE ARGUMENTS`: the first thing a rank runs. It prepares the process
before anything slow is imported: even a failing import is told, and no rank outlives its launcher."""

import atexit
import logging
import os
import runpy
import signal
import sys
from contextlib import suppress

from meshwright.launch import environment, output
from meshwright.launch.ending import die_with_agent, fail
from meshwright.launch.output import redirect
from meshwright.launch.place import Place


def main() -> None:
    here = environment.read()
    die_with_agent(here)
    # Ctrl-C is the launcher's business: it asks the ranks to stop by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if here.folder is not None:
        redirect(here.folder, here.rank, here.attempt, here.speaker)
    module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    finished = atexit.register(_end)  # before all others, so it runs after them
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as exit:
        if exit.code not in (None, 0):
            atexit.unregister(finished)
            raise
    except BaseException as error:
        fail(error, here, Place.nowhere())


def _end() -> None:
    """Ends a rank that has finished. Without this, torch's threads now and then abort the process while C++ takes
    itself down, and all ranks would start again for nothing."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr, output.stderr()):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
