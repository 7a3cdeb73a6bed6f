"""`mpirun -n 2 meshwright train` of OpenMPI and MPICH trains as two ranks, with the weights that `meshwright train`
gives, bit for bit."""

import json
import sys
from pathlib import Path

import pytest

from tests.processes.launchers.runs import TRAIN, need, run, train_with_own_ranks, weights, write_job
from tests.soaked import all_but

# As root and with more ranks than cores, as in a container; mpirun itself listens on the loopback interface only.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_oob_tcp_if_include": "lo",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
MPIRUNS = ("mpirun.openmpi", "mpirun.mpich")

SCRIPT = """
import torch, torch.distributed as dist
import meshwright as mw

model = torch.nn.Linear(2, 1)
session = mw.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.functional.mse_loss)
assert dist.get_world_size() == 2
loss = session.step((torch.ones(4, 2), torch.ones(4, 1)))
print(f"rank {dist.get_rank()}: {float(loss):.6f}")
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return train_with_own_ranks(tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize("mpirun", all_but({MPIRUNS[0]}, MPIRUNS))
def test_mpirun_trains_to_the_same_weights(mpirun: str, tmp_path: Path, expected: dict[str, bytes]) -> None:
    need(mpirun)
    result = run([mpirun, "-n", "2", *TRAIN, write_job(tmp_path), "--json"], **OPEN_MPI)
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("{")]  # one rank prints
    assert json.loads(line)["steps"] == 3
    assert len(expected) == 2
    assert weights(tmp_path) == expected


@pytest.mark.soak
@pytest.mark.parametrize("mpirun", MPIRUNS)
def test_a_script_joins_under_mpirun(mpirun: str, tmp_path: Path) -> None:
    need(mpirun)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = run([mpirun, "-n", "2", "sh", "-c", f"{sys.executable} {script}"], **OPEN_MPI)
    assert result.returncode == 0, result.stderr
    first, second = sorted(line for line in result.stdout.splitlines() if line.startswith("rank "))
    assert first.removeprefix("rank 0: ") == second.removeprefix("rank 1: ")


@pytest.mark.soak
@pytest.mark.parametrize("mpirun", MPIRUNS)
def test_a_rank_with_another_job_file_is_named_and_nothing_is_trained(mpirun: str, tmp_path: Path) -> None:
    need(mpirun)
    job, other = write_job(tmp_path), write_job(tmp_path, "other.yaml", train={"steps": 4, "global_batch": 16})
    result = run([mpirun, "-n", "1", *TRAIN, job, ":", "-n", "1", *TRAIN, other], **OPEN_MPI)
    assert result.returncode != 0
    assert "train.steps is 4 on rank 1 and 3 on rank 0" in result.stderr
    assert not (tmp_path / "runs").exists()
