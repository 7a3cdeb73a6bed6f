"""The torchrun and the mpirun command of a job. Each is one line, and written to be pasted into a shell."""

import shlex
from collections.abc import Mapping

from meshwright.errors import InputError
from meshwright.export.launch_files.request import TOKEN_ASSIGNMENT, LaunchFile, LaunchRequest, python_module

_PORT = """import socket; print(socket.create_server(("localhost", 0)).getsockname()[1])"""
_PRINT_FREE_PORT = shlex.join([python_module("")[0], "-c", _PORT])


def torchrun_command(request: LaunchRequest) -> LaunchFile:
    """Returns the command, which is the same on all machines."""
    layout = request.layout
    port = ""
    if layout.nodes == 1:
        # --standalone would read pickles from a store to which everybody can write, and execute what is in them.
        places = ["--master-addr=localhost"]
        port = f' --master-port="$({_PRINT_FREE_PORT})"'
        where = "sh FILE"
    else:
        places = [
            f"--nnodes={layout.nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-id={request.job.name}",
            f"--rdzv-endpoint={_rendezvous(request, 'torchrun')}",
        ]
        where = f"sh FILE, on each of the {layout.nodes} machines"
    options = [*places, f"--nproc-per-node={layout.ranks_per_node}", f"--max-restarts={request.job.train.restarts}"]
    launcher = shlex.join(_with_variables(request.variables, [*python_module("torch.distributed.run"), *options]))
    return LaunchFile(f"{launcher}{port} {shlex.join(['-m', 'meshwright', *request.arguments])}\n", where)


def mpirun_command(request: LaunchRequest) -> LaunchFile:
    """Returns the command, with the options of Open MPI where the ranks are on several machines. Variables of the ranks
    are set by `env`, because each MPI has another option for that."""
    layout = request.layout
    # Open MPI would bind each of one or two ranks to one core.
    options = ["-n", str(layout.ranks), "--bind-to", "none"]
    variables = dict(request.variables)
    if layout.nodes > 1:
        address, _, port = _rendezvous(request, "mpirun").rpartition(":")
        variables |= {"MASTER_ADDR": address.strip("[]"), "MASTER_PORT": port}
        options += ["--map-by", f"ppr:{layout.ranks_per_node}:node", "-x", "MESHWRIGHT_TOKEN"]
    if hosts := request.options.hosts:
        if len(hosts) != layout.nodes:
            raise InputError(f"--hosts names {len(hosts)} machines, but the ranks are on {layout.nodes}: name as many")
        options += ["-H", ",".join(f"{host}:{layout.ranks_per_node}" for host in hosts)]
    train = [*python_module("meshwright"), *request.arguments]
    command = shlex.join(["mpirun", *options, *_with_variables(variables, train)])
    if layout.nodes > 1:  # the secret must not be a word of the command, which everybody can see
        command = f"{TOKEN_ASSIGNMENT} {command}"
    return LaunchFile(command + "\n", "sh FILE")


def _rendezvous(request: LaunchRequest, program: str) -> str:
    if request.options.rendezvous is None:
        raise InputError(
            f"launch {program} for {request.layout.nodes} machines needs --rendezvous HOST:PORT: the address of the"
            " first machine in a private network, and a free port there"
        )
    return request.options.rendezvous


def _with_variables(variables: Mapping[str, str], words: list[str]) -> list[str]:
    """Returns the command with these environment variables, without a shell."""
    settings = [f"{name}={value}" for name, value in variables.items()]
    return ["env", *settings, *words] if settings else words
