"""The command line of `horovodrun`: which of its options there are, and what is answered for other hosts."""

import argparse
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.errors import InputError
from meshwright.numbers.limits import MOST_RANKS_HERE

VERSION = "0.28.1"  # of Horovod, whose scripts are run
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class LaunchOptions:
    """What to start. `command` is what each rank runs. An elastic job has `min_np` to `max_np` ranks; `discovery` is a
    script that prints the hosts, and `reset_limit` how often workers may be replaced. `variables` are those of the
    options that become environment variables. `counts_ranks` is whether the command line gives their number."""

    command: tuple[str, ...]
    np: int
    elastic: bool = False
    min_np: int = 1
    max_np: int = 1
    discovery: str | None = None
    reset_limit: int | None = None
    output_folder: Path | None = None
    variables: dict[str, str] = field(default_factory=dict)
    counts_ranks: bool = True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="horovodrun", description="Runs a Horovod script on several ranks of this machine.", allow_abbrev=False
    )
    add = parser.add_argument
    add("-np", "--num-proc", type=int, dest="np", metavar="N", help="the number of ranks")
    add("-H", "--hosts", help="the hosts and their slots: localhost:2")
    add("--hostfile", "-hostfile", type=Path, help="a file with the hosts: lines such as localhost slots=2")
    add(
        "--min-np", "--min-num-proc", type=int, dest="min_np", help="an elastic job goes on with at least so many ranks"
    )
    add("--max-np", "--max-num-proc", type=int, dest="max_np", help="an elastic job has at most so many ranks")
    add("--host-discovery-script", dest="discovery", help="prints the hosts of an elastic job: localhost:2")
    add("--slots-per-host", "--slots", type=int, dest="slots", help="slots of hosts that are printed without a number")
    add("--reset-limit", type=int, help="how often the workers of an elastic job may be replaced")
    add("--output-filename", type=Path, dest="output_folder", help="the folder for what each rank prints")
    add("--timeline-filename", dest="HOROVOD_TIMELINE", help="the Chrome trace that rank 0 writes")
    add("--timeline-mark-cycles", action="store_const", const="1", dest="HOROVOD_TIMELINE_MARK_CYCLES")
    add("--fusion-threshold-mb", type=int, help="the most that is fused into one all-reduce")
    add("--cycle-time-ms", dest="HOROVOD_CYCLE_TIME", help="how long gradients are collected before they are reduced")
    add("--cache-capacity", dest="HOROVOD_CACHE_CAPACITY", help="the number of requests that rank 0 remembers")
    add("--no-stall-check", action="store_const", const="1", dest="HOROVOD_STALL_CHECK_DISABLE")
    add("--stall-check-warning-time-seconds", dest="HOROVOD_STALL_CHECK_TIME_SECONDS")
    add("--stall-check-shutdown-time-seconds", dest="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    add("--gloo-timeout-seconds", dest="HOROVOD_GLOO_TIMEOUT_SECONDS", help="how long ranks wait for each other")
    add("--start-timeout", "--elastic-timeout", dest="HOROVOD_GLOO_TIMEOUT_SECONDS", help="the same")
    add("--gloo", action="store_true", help="accepted: ranks are always connected as with --gloo")
    add("--mpi", action="store_true", help="refused: start the script with mpirun")
    add("--verbose", "--disable-cache", "--no-cache", action="store_true", help="accepted, without effect")
    add("-v", "--version", action="version", version=f"horovod {VERSION} of meshwright")
    add("command", nargs=argparse.REMAINDER, help="a script of Python and its arguments, or a command")
    return parser


def parse(arguments: Sequence[str]) -> LaunchOptions:
    options = _parser().parse_args(arguments)
    command = tuple(options.command[1:] if options.command[:1] == ["--"] else options.command)
    if not command:
        raise InputError("horovodrun needs a script: python -m meshwright.compat.horovod -np 2 script.py")
    if command[0].endswith(".py"):
        command = (sys.executable, *command)
    elif command[0] in ("python", "python3"):  # the interpreter that runs this command has meshwright
        command = (sys.executable, *command[1:])
    for option, number in (("-np", options.np), ("--min-np", options.min_np), ("--max-np", options.max_np)):
        if number is not None and number < 1:
            raise InputError(f"{option} {number}: start 1 to {MOST_RANKS_HERE} ranks")
    if options.mpi:
        raise InputError(
            f"--mpi: start the ranks with MPI's own command: {_mpirun(options.hosts or '', options.np or 1, command)}"
        )
    slots = _slots(options, command)
    elastic = options.min_np is not None or options.max_np is not None or options.discovery is not None
    np = options.np or slots or options.min_np or 1
    if np > MOST_RANKS_HERE:
        raise InputError(f"-np {np}: start 1 to {MOST_RANKS_HERE} ranks")
    if slots is not None and np > slots:
        raise InputError(f"-np {np}: the hosts have {slots} slots; write -H localhost:{np}")
    min_np, max_np = options.min_np or (1 if elastic else np), options.max_np or max(np, options.min_np or 1)
    if not 1 <= min_np <= np <= max_np:
        raise InputError(f"--min-np {min_np}, -np {np}, --max-np {max_np}: each has to be at most the next")
    variables = {
        name: value for name, value in vars(options).items() if name.startswith("HOROVOD_") and value is not None
    }
    if options.fusion_threshold_mb is not None:
        variables["HOROVOD_FUSION_THRESHOLD"] = str(options.fusion_threshold_mb * 2**20)
    return LaunchOptions(
        *(command, np, elastic, min_np, max_np, options.discovery, options.reset_limit, options.output_folder),
        variables=variables,
        counts_ranks=options.np is not None or slots is not None or elastic,
    )


def local_slots(lines: Sequence[str], default: int = 1) -> int:
    """Returns the number of slots of this machine in hosts as `localhost:2` or `localhost slots=2`. Other hosts are
    refused."""
    total = 0
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        name, _, count = line.replace(" slots=", ":").partition(":")
        if not is_local(name.strip()):
            raise InputError(f"host {name}: this launcher starts ranks on this machine alone")
        try:
            total += int(count) if count else default
        except ValueError:
            raise InputError(f"host {line}: write the number of slots after a colon: {name}:2") from None
    return total


def is_local(host: str) -> bool:
    return host in _LOCAL_NAMES or host in (socket.gethostname(), socket.getfqdn())


def _slots(options: argparse.Namespace, command: tuple[str, ...]) -> int | None:
    """Returns the number of slots that -H or --hostfile give; None without them."""
    if options.hosts:
        lines = options.hosts.split(",")
    elif options.hostfile:
        try:
            lines = options.hostfile.read_text().splitlines()
        except OSError as error:
            raise InputError(f"--hostfile {options.hostfile}: {error.strerror}") from None
    else:
        return None
    entries = [line.partition("#")[0].replace(" slots=", ":").strip() for line in lines]
    hosts = {entry.partition(":")[0]: entry.partition(":")[2] or "1" for entry in entries if entry}
    remote = [host for host in hosts if not is_local(host)]
    if remote:
        first = next(iter(hosts))
        ranks = options.np or sum(int(slots) for slots in hosts.values())
        script = shlex.join(command[1:] if command[0] == sys.executable else command)
        torchrun = (
            f"torchrun --nnodes {len(hosts)} --nproc-per-node {hosts[first]} --node-rank I --master-addr {first}"
            f" --master-port 29500 {script}"
        )
        listed = ",".join(f"{host}:{slots}" for host, slots in hosts.items())
        raise InputError(
            f"hosts {', '.join(remote)} are other machines, which this launcher does not reach: run `{torchrun}` on"
            f" each of them (I is 0 to {len(hosts) - 1}), or `{_mpirun(listed, ranks, command)}`; the script imports"
            " `meshwright.compat.horovod as hvd`"
        )
    return local_slots(entries)


def _mpirun(hosts: str, ranks: int, command: tuple[str, ...]) -> str:
    first = hosts.partition(",")[0].partition(":")[0] or "localhost"
    at = f" -H {hosts}" if hosts else ""
    shown = shlex.join(("python", *command[1:]) if command[0] == sys.executable else command)
    return f"mpirun -np {ranks}{at} -x MASTER_ADDR={first} -x MASTER_PORT=29500 -x PATH {shown}"
