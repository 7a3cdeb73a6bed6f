"""`meshwright watch`: the page of a run that is going on, served on this machine."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.options import AsJson, path_argument
from meshwright.errors import InputError
from meshwright.report.plotly_script import check_plotly

_LARGEST_PORT = 65_535
_LOWEST_PRIORITY = 19


def watch(
    run: Annotated[Path, path_argument("RUN", "The run folder that train is writing.")],
    port: Annotated[int, typer.Option(min=0, max=_LARGEST_PORT, metavar="P", help="The port; 0 takes a free one.")] = 0,
    address: Annotated[
        str, typer.Option(metavar="A", help="Only 127.0.0.1: other machines must not read the page.")
    ] = "127.0.0.1",
    as_json: AsJson = False,
) -> None:
    """Show a run in a browser while it goes on: ranks, steps, what they are doing, and the page of `report`. Ctrl-C
    ends it; the run goes on."""
    _lower_priority()
    from meshwright.report.run.watch import LOOPBACK, RunServer

    if address not in (LOOPBACK, "localhost"):
        raise InputError(
            f"--address {address}: the page is served on 127.0.0.1 only; from another machine, forward the port with"
            f" `ssh -L {port or 8000}:127.0.0.1:{port or 8000} THIS_MACHINE` and --port {port or 8000}"
        )
    check_plotly()
    with RunServer(run, port) as server:
        if as_json:
            print(json.dumps({"url": server.url}), flush=True)
        else:
            print(f"{run} is shown at {server.url} (Ctrl-C ends this, not the run)", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def _lower_priority() -> None:
    """Lets the ranks of this machine go first, also while this process imports what it needs."""
    with suppress(OSError):
        os.nice(_LOWEST_PRIORITY)
