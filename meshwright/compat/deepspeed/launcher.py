"""`python -m meshwright.compat.deepspeed [--num_gpus N] script.py …`: runs a script that imports DeepSpeed, as the
command `deepspeed` does, with the drop-in as `import deepspeed`. It starts one rank for each GPU of this machine. In a
process that torchrun or another launcher has started as a rank, it runs the script as that rank."""

import argparse
import runpy
import sys
from pathlib import Path

from meshwright.compat.deepspeed.modules import provide
from meshwright.errors import InputError, MeshwrightError
from meshwright.processes.environment import read_environment
from meshwright.processes.local.launch_function import launch

_ALL = -1  # DeepSpeed's default for the number of GPUs


def main() -> None:
    """Parses the command line and runs the script. Prints the error of a failed rank, and exits with its code."""
    options = parse(sys.argv[1:])
    try:
        run(options)
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


def run(options: argparse.Namespace) -> None:
    """Runs the script in this process if it is a rank already; otherwise in new ranks."""
    arguments = [options.user_script, *options.user_args]
    if read_environment().launched:
        run_script(options.user_script, options.user_args, options.module, options.no_local_rank)
        return
    if options.num_gpus < 1 and options.num_gpus != _ALL:
        raise InputError(f"--num_gpus {options.num_gpus}: start at least 1 rank")
    if _other_hosts(options):
        machines = str(options.num_nodes) if options.num_nodes > 0 else "N"
        raise InputError(
            f"this command starts ranks on this machine only: on each of the {machines} machines, run"
            f" torchrun --nnodes {machines} --nproc-per-node {max(1, options.num_gpus)} --rdzv-backend"
            f" c10d --rdzv-endpoint {options.master_addr or 'HOST'}:{options.master_port} -m"
            f" meshwright.compat.deepspeed {' '.join(arguments)}"
        )
    if not options.module and not Path(options.user_script).is_file():
        raise InputError(f"{options.user_script}: there is no such script")
    import torch

    ranks = options.num_gpus if options.num_gpus > 0 else max(1, torch.cuda.device_count())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    launch(
        run_script,
        options.user_script,
        options.user_args,
        options.module,
        options.no_local_rank,
        ranks=ranks,
        device=device,  # type: ignore[arg-type]
    )


def run_script(script: str, arguments: list[str], is_module: bool, no_local_rank: bool) -> None:
    """Runs the script as `__main__` in this rank. As DeepSpeed's launcher, it is given `--local_rank=N` first."""
    provide()
    local_rank = [] if no_local_rank else [f"--local_rank={read_environment().local_rank}"]
    sys.argv = [script, *local_rank, *arguments]
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _other_hosts(options: argparse.Namespace) -> bool:
    return options.num_nodes > 1 or options.hostfile is not None or options.include != "" or options.exclude != ""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of the command line. What comes after the script is its own."""
    parser = argparse.ArgumentParser(
        prog="python -m meshwright.compat.deepspeed",
        description="Runs a script that imports DeepSpeed with Meshwright.",
    )
    parser.add_argument(
        "--num_gpus", "--num_accelerators", type=int, default=_ALL, help="ranks; by default one for each GPU"
    )
    parser.add_argument("--num_nodes", type=int, default=-1, help="machines; only one is started")
    parser.add_argument("-H", "--hostfile", default=None, help="machines; answered with a torchrun command")
    parser.add_argument("-i", "--include", default="", help="answered with a torchrun command")
    parser.add_argument("-e", "--exclude", default="", help="answered with a torchrun command")
    parser.add_argument("--master_addr", default="", help="for the torchrun command")
    parser.add_argument("--master_port", type=int, default=29500, help="for the torchrun command")
    parser.add_argument("--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("--no_local_rank", action="store_true", help="do not give the script --local_rank=N")
    parser.add_argument("user_script", help="the script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(arguments)
