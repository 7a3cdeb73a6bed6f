"""Ranks that mpirun has started on one machine find each other without further variables."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import meshwright.compat.horovod as hvd
from meshwright.compat.horovod.launcher import command
from meshwright.compat.horovod.variables import read_horovod_variables
from meshwright.errors import InputError
from tests.ranks import RankPool

OTHER_LAUNCHERS = ("HOROVOD_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI")


def variables_of_open_mpi(rank: int, size: int, folder: Path) -> dict[str, str]:
    """The environment of a rank of Open MPI 5."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OTHER_LAUNCHERS)}
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    ompi = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in zip(names, (rank, size) * 2, strict=True)}
    return {**kept, **ompi, "PMIX_NAMESPACE": "prterun-host-17@1", "PMIX_SERVER_TMPDIR": str(folder)}


def _sums(rank: int, size: int, folder: Path) -> list[float]:
    sums = []
    with patch.dict(os.environ, variables_of_open_mpi(rank, size, folder), clear=True):
        for _ in range(2):
            hvd.init()
            sums.append(float(hvd.allreduce(torch.tensor(1.0 + hvd.rank()), op=hvd.Sum)))
            hvd.shutdown()
    return sums


@pytest.mark.core
def test_ranks_of_open_mpi_find_each_other(two: RankPool, tmp_path: Path) -> None:
    assert two.run(_sums, tmp_path) == [[3.0, 3.0]] * 2


def test_ranks_on_several_machines_are_told_how_to_give_an_address(tmp_path: Path) -> None:
    variables = {**variables_of_open_mpi(0, 2, tmp_path), "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with (
        patch.dict(os.environ, variables, clear=True),
        pytest.raises(InputError, match="mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500"),
    ):
        read_horovod_variables()


def test_the_launcher_runs_a_script_as_the_rank_that_mpirun_has_started(tmp_path: Path) -> None:
    """Without -np. It would otherwise start a world of one rank in each of mpirun's ranks."""
    script = tmp_path / "train.py"
    script.touch()
    executed = RuntimeError("executed")
    with (
        patch.dict(os.environ, variables_of_open_mpi(1, 2, tmp_path), clear=True),
        patch.object(os, "execvpe", side_effect=executed) as execute,
        pytest.raises(RuntimeError, match="executed"),
    ):
        command.launch([str(script), "--lr", "1"])
    program, words, variables = execute.call_args.args
    assert (program, words) == (sys.executable, (sys.executable, str(script), "--lr", "1"))
    assert variables["OMPI_COMM_WORLD_RANK"] == "1"
    assert (Path(variables["PYTHONPATH"].split(os.pathsep)[0]) / "horovod" / "__init__.py").exists()


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_mpirun_starts_a_script_that_imports_horovod(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, horovod.torch as hvd\nhvd.init()\n"
        "print('RESULT', hvd.rank(), hvd.local_size(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), flush=True)\n"
    )
    mpirun = ["mpirun", "--oversubscribe", "--allow-run-as-root", "-n", "2"]
    done = subprocess.run(
        [*mpirun, sys.executable, "-m", "meshwright.compat.horovod", str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=Path(__file__).parents[3],
        env={name: value for name, value in os.environ.items() if not name.startswith(OTHER_LAUNCHERS)},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "RESULT" in line) == ["RESULT 0 2 2.0", "RESULT 1 2 2.0"]
