"""Measures the same all-reduces with OpenMPI, if `mpirun` and mpi4py are installed: `mpirun -n N python -m
validation.bench.collectives.openmpi ROUNDS SIZES...`."""

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

from meshwright.cluster.cores import usable_cores
from meshwright.errors import InputError
from validation.bench.collectives.compare import REFERENCE, CollectiveRow

_MODULE = "validation.bench.collectives.openmpi"
_BUDGET_S = 0.05
_PREFIX = "meshwright-openmpi "
TIME_LIMIT_S = 600


def openmpi_rows(rows: Sequence[CollectiveRow], rounds: int) -> list[CollectiveRow]:
    """Returns the rows with one more row at the end of each size: OpenMPI with the same number of ranks on this
    machine."""
    times = _measure(rows[0].ranks, sorted({row.bytes for row in rows}), rounds)
    native = {row.bytes: row.time_s for row in rows if row.algorithm == REFERENCE}
    all_rows: list[CollectiveRow] = []
    for index, row in enumerate(rows):
        all_rows.append(row)
        if index + 1 < len(rows) and rows[index + 1].bytes == row.bytes:
            continue
        rounds_s = times[row.bytes]
        time_s = median(rounds_s)
        all_rows.append(
            CollectiveRow(
                algorithm="openmpi",
                ranks=row.ranks,
                bytes=row.bytes,
                time_s=time_s,
                spread=(min(rounds_s), max(rounds_s)),
                bandwidth_bytes_per_s=row.bytes / time_s,
                ratio_to_native=time_s / native[row.bytes],
                predicted_s=None,
            )
        )
    return all_rows


def is_installed() -> bool:
    return _mpirun() is not None and importlib.util.find_spec("mpi4py") is not None


def _mpirun() -> str | None:
    in_environment = Path(sys.executable).with_name("mpirun")
    return str(in_environment) if in_environment.exists() else shutil.which("mpirun")


def _measure(ranks: int, sizes: Sequence[int], rounds: int) -> dict[int, list[float]]:
    mpirun = _mpirun()
    if mpirun is None or not is_installed():
        raise InputError(
            "--openmpi needs mpirun and mpi4py, and one of them is missing: install both, or leave the option out"
        )
    # The option is left out if each rank has a core of its own, because with it a waiting rank yields its core.
    oversubscribe = ["--oversubscribe"] if ranks > usable_cores() else []
    command = [mpirun, "--allow-run-as-root", *oversubscribe, "-n", str(ranks), sys.executable, "-m", _MODULE]
    command += [str(rounds), *map(str, sizes)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIME_LIMIT_S)
    results = [line.removeprefix(_PREFIX) for line in process.stdout.splitlines() if line.startswith(_PREFIX)]
    if process.returncode or not results:
        raise InputError(f"mpirun failed: {(process.stderr.strip().splitlines() or ['no message'])[-1]}")
    return {int(size): rounds_s for size, rounds_s in json.loads(results[0]).items()}


def main() -> None:
    import numpy as np
    from mpi4py import MPI

    world: Any = MPI.COMM_WORLD
    rounds, sizes = int(sys.argv[1]), [int(word) for word in sys.argv[2:]]
    times: dict[int, list[float]] = {}
    for size in sizes:
        flat = np.ones(max(1, size // 4), dtype=np.float32)
        ranks = np.float32(world.Get_size())

        def run(flat: Any = flat, ranks: Any = ranks) -> None:
            world.Allreduce(MPI.IN_PLACE, flat, op=MPI.SUM)
            np.divide(flat, ranks, out=flat)  # the mean, as the reducers leave it

        run()
        times[size] = [_time_round(world, MPI.MAX, run) for _ in range(rounds)]
    if world.Get_rank() == 0:
        print(_PREFIX + json.dumps(times), flush=True)


def _time_round(world: Any, maximum: Any, run: Any) -> float:
    """Returns the mean seconds of one call of `run` on the slowest rank, over as many calls as take about
    `_BUDGET_S`."""
    world.Barrier()
    begin = perf_counter()
    run()
    one_run_s = world.allreduce(perf_counter() - begin, op=maximum)
    repeats = max(1, min(1000, int(_BUDGET_S / one_run_s)))
    world.Barrier()
    run()
    begin = perf_counter()
    for _ in range(repeats):
        run()
    return float(world.allreduce((perf_counter() - begin) / repeats, op=maximum))


if __name__ == "__main__":
    main()
