"""`horovod.run`: calls a function on several new ranks of this machine, and returns what it returns on each."""

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwright.compat.horovod.launcher.arguments import parse
from meshwright.compat.horovod.launcher.static import run_static
from meshwright.errors import InputError
from meshwright.processes.local.function_pickle import pickle_call, pickle_value, unpickle_call, unpickle_value


def run(
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    hosts: str | None = None,
    **options: Any,
) -> list[Any]:
    """Returns what the function returns on each of `np` ranks. Of the options of `horovod.run`, those that choose how
    ranks are connected are accepted (`use_gloo`, `verbose`); others are refused."""
    if options.get("use_mpi"):
        raise InputError("horovod.run(use_mpi=True): start the script with mpirun, or leave use_mpi out")
    unknown = [name for name, value in options.items() if value and name not in ("use_gloo", "verbose", "use_mpi")]
    if unknown:
        raise InputError(f"horovod.run: there is no option {', '.join(unknown)}: leave it out")
    with tempfile.TemporaryDirectory(prefix="horovod-run-") as name:  # nobody else can read or write in it
        folder = Path(name)
        (folder / "call").write_bytes(pickle_call(func, args, kwargs or {}))
        where = ["-H", hosts] if hosts else []
        command = [sys.executable, "-m", __name__, str(folder), os.pathsep.join(sys.path)]
        run_static(parse(["-np", str(np), *where, "--", *command]))
        return [unpickle_value((folder / f"value{rank}").read_bytes()) for rank in range(np)]


def _run_as_rank(folder: Path, path: str) -> None:
    from meshwright.compat.horovod.variables import read_horovod_variables

    sys.path[:] = path.split(os.pathsep)
    rank = read_horovod_variables().rank
    func, args, kwargs = unpickle_call((folder / "call").read_bytes())
    (folder / f"value{rank}").write_bytes(pickle_value(func(*args, **kwargs), func))


if __name__ == "__main__":
    _run_as_rank(Path(sys.argv[1]), sys.argv[2])
