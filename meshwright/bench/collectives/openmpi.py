"""The same all-reduces by OpenMPI, where `mpirun` and mpi4py are there: `mpirun -n N python -m
meshwright.bench.collectives.openmpi ROUNDS SIZES...`."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from meshwright.bench.collectives.compare import REFERENCE, Row
from meshwright.cluster.cores import usable_cores
from meshwright.errors import InputError

_MODULE = "meshwright.bench.collectives.openmpi"
_BUDGET_S = 0.05
_MARK = "meshwright-openmpi "
TIME_LIMIT_S = 600


def openmpi_rows(rows: Sequence[Row], rounds: int) -> list[Row]:
    """The rows, and behind those of each size one of OpenMPI, on as many ranks of this machine."""
    times = _measured(rows[0].ranks, sorted({row.bytes for row in rows}), rounds)
    native = {row.bytes: row.time_s for row in rows if row.algorithm == REFERENCE}
    found: list[Row] = []
    for place, row in enumerate(rows):
        found.append(row)
        if place + 1 < len(rows) and rows[place + 1].bytes == row.bytes:
            continue
        taken = times[row.bytes]
        time_s = median(taken)
        spread, speed = (min(taken), max(taken)), row.bytes / time_s
        found.append(Row("openmpi", row.ranks, row.bytes, time_s, spread, speed, time_s / native[row.bytes], None))
    return found


def is_there() -> bool:
    return _mpirun() is not None and importlib.util.find_spec("mpi4py") is not None


def _mpirun() -> str | None:
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def _measured(ranks: int, sizes: Sequence[int], rounds: int) -> dict[int, list[float]]:
    mpirun = _mpirun()
    if mpirun is None or not is_there():
        raise InputError("--openmpi needs mpirun and mpi4py, of which one is missing: install both, or leave it out")
    # Where a rank has a core of its own it need not offer it to others while it waits.
    crowded = ["--oversubscribe"] if ranks > usable_cores() else []
    words = [mpirun, "--allow-run-as-root", *crowded, "-n", str(ranks), sys.executable, "-m", _MODULE]
    words += [str(rounds), *map(str, sizes)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=TIME_LIMIT_S)
    said = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not said:
        raise InputError(f"mpirun failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    return {int(size): taken for size, taken in json.loads(said[0]).items()}


def main() -> None:
    import numpy as np
    from mpi4py import MPI

    world: Any = MPI.COMM_WORLD
    rounds, sizes = int(sys.argv[1]), [int(word) for word in sys.argv[2:]]
    found: dict[int, list[float]] = {}
    for size in sizes:
        flat = np.ones(max(1, size // 4), dtype=np.float32)
        ranks = np.float32(world.Get_size())

        def run(flat: Any = flat, ranks: Any = ranks) -> None:
            world.Allreduce(MPI.IN_PLACE, flat, op=MPI.SUM)
            np.divide(flat, ranks, out=flat)  # the mean, as the reducers leave it

        run()
        found[size] = [_once(world, MPI.MAX, run) for _ in range(rounds)]
    if world.Get_rank() == 0:
        print(_MARK + json.dumps(found), flush=True)


def _once(world: Any, largest: Any, run: Any) -> float:
    world.Barrier()
    begun = perf_counter()
    run()
    once = world.allreduce(perf_counter() - begun, op=largest)
    repeats = max(1, min(1000, int(_BUDGET_S / once)))
    world.Barrier()
    run()
    begun = perf_counter()
    for _ in range(repeats):
        run()
    return float(world.allreduce((perf_counter() - begun) / repeats, op=largest))


if __name__ == "__main__":
    main()
