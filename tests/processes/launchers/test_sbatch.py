"""The script that `meshwright launch slurm` writes, submitted to a real Slurm: a job that is preempted, or queued again
by hand, saves, starts again, and ends with the weights of an undisturbed one, bit for bit."""

import sys
from pathlib import Path

import pytest

from tests.processes.launchers.runs import need_slurm, run, train_with_own_ranks, weights, write_job

STEPS, DISTURBED_AT = 24, 6


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    need_slurm()
    return train_with_own_ranks(tmp_path_factory.mktemp("own"), STEPS)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["preempt", "requeue", "cancel"])
def test_a_job_that_is_queued_again_goes_on_and_one_that_is_cancelled_does_not(
    how: str, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    train = {"steps": STEPS, "global_batch": 16, "seed": 0, "grace_s": 20}
    job, script, output = write_job(tmp_path, train=train), tmp_path / "job.sbatch", tmp_path / "output"
    launch = [sys.executable, "-m", "meshwright", "launch", "slurm"]
    written = run([*launch, job, "--partition", "all", "--output", script])
    assert written.returncode == 0, written.stderr
    (tmp_path / "slurm").mkdir()
    slurm = ["unshare", "-n", sys.executable, "-m", "tests.processes.launchers.slurm", str(tmp_path / "slurm")]
    disturb = [sys.executable, "-m", "tests.processes.launchers.preemption", how, str(script), str(output)]
    result = run([*slurm, *disturb, str(tmp_path / "runs" / "digits-0001"), str(DISTURBED_AT)])
    printed = output.read_text()
    assert result.returncode == 0, result.stderr + printed
    assert "stopped after step" in printed, printed
    assert printed.count("resuming after step") == (0 if how == "cancel" else 1), printed
    if how == "cancel":
        return
    assert weights(tmp_path, STEPS) == undisturbed, printed
