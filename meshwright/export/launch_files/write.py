"""The table of programs that `meshwright launch` writes files for."""

from collections.abc import Callable

from meshwright.export.launch_files.commands import mpirun_command, torchrun_command
from meshwright.export.launch_files.kubernetes import trainjob_manifest
from meshwright.export.launch_files.request import LaunchFile, LaunchRequest, check_printable
from meshwright.export.launch_files.slurm import slurm_script

_WRITERS: dict[str, Callable[[LaunchRequest], LaunchFile]] = {
    "slurm": slurm_script,
    "kubernetes": trainjob_manifest,
    "torchrun": torchrun_command,
    "mpirun": mpirun_command,
}
PROGRAMS = tuple(_WRITERS)


def write_launch_file(program: str, request: LaunchRequest) -> LaunchFile:
    """Returns the launch file of one of `PROGRAMS`. No value of the request can add a line to it."""
    check_printable("the working folder", [request.folder])
    check_printable("output", [request.job.output])
    check_printable("--image", [request.options.image or ""])
    check_printable("the plan", [request.plan])
    return _WRITERS[program](request)
