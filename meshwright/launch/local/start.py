"""`python -m meshwright.launch.local.start MODULE ARGUMENTS`: the first thing a rank runs. It prepares the process
before anything slow is imported: even a failing import is told, and no rank outlives its launcher."""

import runpy
import signal
import sys

from meshwright.launch import environment
from meshwright.launch.ending import die_with_agent, fail, finishing
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
    try:
        with finishing():
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit:
        raise
    except BaseException as error:
        fail(error, here, Place.nowhere())


if __name__ == "__main__":
    main()
