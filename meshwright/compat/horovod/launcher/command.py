"""`python -m meshwright.compat.horovod` and `meshwright horovodrun`."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.compat.horovod.launcher.arguments import parse
from meshwright.compat.horovod.launcher.elastic_job import ElasticJob
from meshwright.compat.horovod.launcher.static import run_static
from meshwright.compat.horovod.launcher.worker_process import import_variables
from meshwright.compat.horovod.variables import is_rank
from meshwright.errors import InputError, MeshwrightError
from meshwright.processes.environment import variables_with


def launch(arguments: Sequence[str]) -> None:
    """Starts the ranks that the command line describes, and returns when they are done. In a process that mpirun or
    torchrun has started as one of several ranks, it runs the script as that rank, unless a number of ranks is given."""
    options = parse(arguments)
    script = options.command[1] if len(options.command) > 1 and options.command[0] == sys.executable else ""
    if script.endswith(".py") and not Path(script).is_file():
        raise InputError(f"{script}: there is no such script")
    if shutil.which(options.command[0]) is None:
        raise InputError(f"{options.command[0]}: there is no such program")
    if not options.counts_ranks and is_rank():
        variables = variables_with(**import_variables(), **options.variables)
        os.execvpe(options.command[0], options.command, variables)
    if options.elastic:
        ElasticJob(options).run()
    else:
        run_static(options)


def main() -> None:
    try:
        launch(sys.argv[1:])
    except MeshwrightError as error:
        print(f"horovodrun: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
