"""A small training run that tests start under launchers, and its weights."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from meshwright.processes.environment import python_path_with
from tests.forking.environment import REPOSITORY
from tests.forking.forked import start_command

JOB = {
    "name": "digits",
    "model": {"call": "meshwright.workloads.mnist:Net"},
    "data": {"train": {"call": "meshwright.workloads.mnist:digits", "split": "train"}, "synthetic": True, "workers": 0},
    "loss": {"call": "torch.nn.functional:cross_entropy"},
    "optimizer": {"call": "torch.optim:SGD", "lr": 0.05, "momentum": 0.9},
    "train": {"steps": 3, "global_batch": 16, "seed": 0},
    "checkpoint": {"every_steps": None},
    "log": {"every_steps": 1, "tensorboard": False},
    "plan": {"axes": {"replicate": 2}, "compute": {"threads": 1}},
    "cluster": "2xcpu",
}
TRAIN = [sys.executable, "-m", "meshwright", "train"]


def write_job(folder: Path, name: str = "job.yaml", **changes: object) -> Path:
    """Writes a job whose runs go to the folder of its name."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(yaml.safe_dump({**JOB, "output": str(folder / "runs"), **changes}))
    return file


def weights(folder: Path, steps: int = 3) -> dict[str, bytes]:
    """Returns the content of the last checkpoint's tensor files in the only run of the folder."""
    (run,) = (folder / "runs").iterdir()
    return {file.name: file.read_bytes() for file in sorted((run / "checkpoints").glob(f"*-{steps:08d}/rank-*.bin"))}


def train_with_own_ranks(folder: Path, steps: int = 3) -> dict[str, bytes]:
    """Returns the weights that `meshwright train` gives with two ranks that it starts itself."""
    process = start_command(["train", str(write_job(folder)), "--set", f"train.steps={steps}"])
    _, err = process.communicate(timeout=120)
    assert process.poll() == 0, err
    return weights(folder, steps)


def need(*programs: str) -> None:
    """Skips the test if a program is not installed."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


def need_slurm() -> None:
    """Skips the test if Slurm's daemons cannot run here."""
    need("slurmctld", "slurmd", "munged", "srun", "sbatch", "unshare", "ip")
    if os.geteuid() != 0 or subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode != 0:
        pytest.skip("Slurm's daemons need root and a network namespace of their own, which this system does not permit")
    if (os.cpu_count() or 1) < 2:
        pytest.skip("Slurm gives two tasks two cores")


def run(command: Sequence[str | Path], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": python_path_with(REPOSITORY), **variables}
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=200, env=environment, cwd=REPOSITORY
    )
