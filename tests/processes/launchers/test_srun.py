"""`srun -n 2 meshwright train` trains as two ranks under a real Slurm, with the weights that `meshwright train` gives,
bit for bit. A batch script without srun is no rank: it starts its own."""

import shlex
import sys
from pathlib import Path

import pytest

from tests.processes.launchers.runs import TRAIN, need_slurm, run, train_with_own_ranks, weights, write_job


@pytest.mark.soak
def test_srun_and_a_batch_script_train_to_the_same_weights(tmp_path: Path) -> None:
    need_slurm()
    by_srun, by_batch = write_job(tmp_path / "srun"), write_job(tmp_path / "batch")
    batch = tmp_path / "batch.sh"
    batch.write_text(
        f"#!/bin/sh\nenv | grep ^SLURM > {tmp_path}/variables\nexec {shlex.join([*TRAIN, str(by_batch)])}\n"
    )
    both = (
        f"srun -n 2 {shlex.join([*TRAIN, str(by_srun)])} && sbatch --wait -n 2 -o {tmp_path}/output {batch}"
        f" || {{ cat {tmp_path}/output; exit 1; }}"
    )
    (tmp_path / "slurm").mkdir()
    slurm = ["unshare", "-n", sys.executable, "-m", "tests.processes.launchers.slurm", str(tmp_path / "slurm")]
    result = run([*slurm, "sh", "-c", both])
    assert result.returncode == 0, result.stderr + result.stdout
    variables = (tmp_path / "variables").read_text()
    assert "SLURM_NTASKS=2" in variables
    assert "SLURM_STEP_ID" not in variables
    expected = train_with_own_ranks(tmp_path / "own")
    assert weights(tmp_path / "srun") == expected
    assert weights(tmp_path / "batch") == expected
