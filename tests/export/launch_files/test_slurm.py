"""The sbatch script, read back: its options, and what it does with commands that stand for those of Slurm."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from meshwright.export.launch_files.layout import Layout
from meshwright.export.launch_files.request import LaunchRequest
from meshwright.export.launch_files.slurm import slurm_script
from tests.export.launch_files.requests import HOSTILE, TWO_MACHINES, request
from tests.train.one_process import toy_job


def sbatch_options(text: str) -> dict[str, str]:
    """Returns the options that sbatch reads: those before the first command."""
    comments = text.partition("\ncd ")[0].splitlines()
    assert comments[0] == "#!/bin/bash"
    words = [line.removeprefix("#SBATCH --") for line in comments if line.startswith("#SBATCH ")]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def test_the_options_are_those_of_the_layout() -> None:
    text = slurm_script(request(time_s=93_784, partition="gpu", interface="ib0")).text
    assert sbatch_options(text) == {
        "job-name": "toy",
        "nodes": "2",
        "ntasks-per-node": "8",
        "gpus-per-node": "8",
        "cpus-per-task": "12",
        "time": "1-02:03:04",
        "partition": "gpu",
        "signal": "B:USR1@45",  # train.grace_s is 30
        "open-mode": "append",
        "requeue": "",
    }
    assert "export GLOO_SOCKET_IFNAME=ib0\nexport NCCL_SOCKET_IFNAME=ib0\n" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_ranks_on_cpus_ask_for_no_gpus() -> None:
    options = sbatch_options(slurm_script(request(layout=Layout(1, 2, on_gpus=False, cores_per_rank=3))).text)
    assert "gpus-per-node" not in options
    assert "time" not in options
    assert (options["nodes"], options["ntasks-per-node"], options["cpus-per-task"]) == ("1", "2", "3")


# Commands that stand for Slurm's: they append their words to `calls`, separated by NUL. `srun` runs `step`.
_STAND_IN = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" >>"$CALLS"; printf '\\n' >>"$CALLS"
"""


def run_script(
    place: Path, step: str, folder: str = "work", state: str = "RUNNING", **fields: object
) -> tuple[int, list[list[str]]]:
    """Runs the script for a folder of this name in `place`. `state` is that of the job when the step has ended. Returns
    its exit code, and the words of each command of Slurm that it called."""
    (place / folder).mkdir(exist_ok=True)
    programs = place / "programs"
    programs.mkdir(exist_ok=True)
    for name, end in {"srun": step, "scancel": "", "scontrol": "", "squeue": f"echo {state}"}.items():
        (programs / name).write_text(_STAND_IN + end)
        (programs / name).chmod(0o755)
    calls = place / "calls"
    calls.unlink(missing_ok=True)
    job = toy_job(output="runs", train={"epochs": 1, "restarts": 2})
    script = slurm_script(request(**{"job": job, "folder": str(place / folder), **fields})).text
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(calls), "SLURM_JOB_ID": "7"}
    run = subprocess.run(["bash"], input=script, text=True, env=variables, capture_output=True, timeout=60, check=False)
    lines = calls.read_text().splitlines() if calls.exists() else []
    return run.returncode, [line.rstrip("\0").split("\0") for line in lines]


SRUN = ["srun", "--kill-on-bad-exit=1", "--cpus-per-task=12"]


def test_no_value_is_executed(tmp_path: Path) -> None:
    arguments = ("train", HOSTILE, f"--set=a={HOSTILE}")
    code, calls = run_script(tmp_path, "exit 7", HOSTILE, arguments=arguments, job=toy_job(output=HOSTILE))
    assert code == 7
    assert {tuple(call[-len(arguments) :]) for call in calls} == {arguments}
    assert not list(tmp_path.rglob("pwned"))
    text = slurm_script(request(arguments=arguments)).text
    train = next(line for line in text.splitlines() if line.startswith("train=("))
    assert shlex.split(train.removeprefix("train=(").removesuffix(")"))[3:] == [*arguments]


def test_failed_ranks_start_again_but_not_forever(tmp_path: Path) -> None:
    code, calls = run_script(tmp_path, "exit 7")
    assert (code, [call[: len(SRUN)] for call in calls]) == (7, [SRUN] * 3)
    code, calls = run_script(tmp_path, "exit 2")  # wrong input
    assert (code, len(calls)) == (2, 1)


# The step that is interrupted: it signals the script, its grandparent, and ends as ranks that have saved.
_STOPPED = "kill -{signal} $(awk '{{print $4}}' /proc/$PPID/stat); exit 0"


@pytest.mark.parametrize(
    ("step", "result", "state", "commands"),
    [
        (_STOPPED.format(signal=10), False, "RUNNING", ["srun", "scancel", "squeue", "scontrol"]),  # USR1: time is up
        (_STOPPED.format(signal=10), True, "RUNNING", ["srun", "scancel"]),  # finished after all
        (_STOPPED.format(signal=10), False, "COMPLETING", ["srun", "scancel", "squeue"]),  # cancelled meanwhile
        (_STOPPED.format(signal=15), False, "COMPLETING", ["srun", "squeue"]),  # cancelled
        ("exit 0", False, "RUNNING", ["srun", "squeue", "scontrol"]),  # preempted: the ranks have saved
        ("exit 0", True, "RUNNING", ["srun"]),
    ],
)
def test_a_job_that_is_stopped_before_its_end_is_queued_again_unless_it_was_cancelled(
    tmp_path: Path, step: str, result: bool, state: str, commands: list[str]
) -> None:
    for run in ("toy-0009", "toy-0010", "toy-x-0011"):
        (tmp_path / "work" / "runs" / run).mkdir(parents=True)
    (tmp_path / "work" / "runs" / ("toy-0010" if result else "toy-0009") / "result.json").touch()
    code, calls = run_script(tmp_path, step, state=state)
    assert (code, [call[0] for call in calls]) == (0, commands)
    if "scancel" in commands:
        assert calls[1] == ["scancel", "--signal=TERM", "7"]
    if "scontrol" in commands:
        assert calls[-1] == ["scontrol", "requeue", "7"]


def test_a_long_grace_period_stays_within_slurms_limit() -> None:
    job = toy_job(train={"epochs": 1, "grace_s": 1e6})
    options = sbatch_options(slurm_script(LaunchRequest(job, "plan", TWO_MACHINES, (), "/")).text)
    assert options["signal"] == "B:USR1@65535"
