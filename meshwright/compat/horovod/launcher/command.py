"""`python -m meshwright.compat.horovod` and `meshwright horovodrun`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.compat.horovod.launcher.arguments import parse
from meshwright.compat.horovod.launcher.elastic_job import ElasticJob
from meshwright.compat.horovod.launcher.static import run_static
from meshwright.errors import InputError, MeshwrightError


def launch(arguments: Sequence[str]) -> None:
    """Starts the ranks that the command line describes, and returns when they are done."""
    options = parse(arguments)
    script = options.command[1] if len(options.command) > 1 and options.command[0] == sys.executable else ""
    if script.endswith(".py") and not Path(script).is_file():
        raise InputError(f"{script}: there is no such script")
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
