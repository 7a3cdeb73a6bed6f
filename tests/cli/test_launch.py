"""`meshwright launch`: what is on stdout, what is refused, and a command that trains."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.cli.commands import RefusalOf, RunCommand

PLAN = {"axes": {"replicate": 4}}


def test_only_the_file_is_on_stdout(folder: Path, run_command: RunCommand) -> None:
    (folder / "plan.yaml").write_text(yaml.safe_dump(PLAN))
    words = ("launch", "kubernetes", "job.yaml", "--plan", "plan.yaml", "--nodes", "2", "--image", "toy")
    printed = run_command(*words)
    assert printed.exit_code == 0, printed.stderr
    secret, train_job = yaml.safe_load_all(printed.stdout)
    trainer = train_job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    assert trainer["command"][4:] == ["train", "./job.yaml", "--resume=auto", "--plan=./plan.yaml"]
    written = run_command(*words, "--output", "job.k8s", "--json")
    result = json.loads(written.stdout)
    assert (result["file"], result["nodes"], result["ranks_per_node"]) == ("job.k8s", 2, 2)
    assert (folder / "job.k8s").stat().st_mode & 0o077 == 0, "it has a secret"
    other_secret, same_train_job = yaml.safe_load_all((folder / "job.k8s").read_text())
    assert same_train_job == train_job
    assert other_secret["stringData"]["token"] != secret["stringData"]["token"]


@pytest.mark.soak
def test_the_plan_is_found_for_the_cluster(folder: Path, run_command: RunCommand) -> None:
    result = run_command("launch", "slurm", "job.yaml", "--cluster", "2x2xH100", "--set", "train.global_batch=32")
    assert result.exit_code == 0, result.stderr
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n#SBATCH --gpus-per-node=2\n" in result.stdout
    line = next(line for line in result.stdout.splitlines() if line.startswith("train=("))
    words = shlex.split(line.removeprefix("train=(").removesuffix(")"))
    job, *options = words[words.index("train") + 1 :]
    assert job == str(folder / "job.yaml")
    assert options == ["--resume=auto", "--cluster=2x2xH100", "--set=train.global_batch=32"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("sulrm", "job.yaml"), "launch 'sulrm': no such program: did you mean 'slurm'?"),
        (("slurm", "job.yaml", "--image", "x"), "--image x: launch slurm has no such option"),
        (("torchrun", "job.yaml", "--time", "1"), "--time 1: launch torchrun has no such option"),
        (("slurm", "job.yaml", "--partition", "a\n#SBATCH --uid=0"), "--partition"),
        (("slurm", "job.yaml", "--partition", "a b"), "--partition 'a b'"),
        (("slurm", "job.yaml", "--interface", "eth0;id"), "--interface 'eth0;id'"),
        (("slurm", "job.yaml", "--time", "soon"), "--time 'soon'"),
        (("slurm", "job.yaml", "--set", "output=a\nb"), "line breaks"),
        (("kubernetes", "job.yaml"), "needs --image"),
        (("kubernetes", "job.yaml", "--image", "a\nb"), "line breaks"),
        (("torchrun", "job.yaml", "--nodes", "2", "--set", "plan.axes.replicate=2"), "needs --rendezvous"),
        (("torchrun", "job.yaml", "--rendezvous", "a:b"), "the port is 'b'"),
        (("mpirun", "job.yaml", "--hosts", "a,-b"), "'-b' is no host name"),
        (("slurm", "job.yaml", "--nodes", "3"), "has 2 ranks, which 3 machines"),
        (("slurm", "job.yaml", "--gpus-per-node", "2"), "'2xcpu' has no GPUs"),
        (("slurm", "job.yaml", "--output", "no/such.sbatch"), "there is no folder no"),
    ],
)
def test_wrong_values_are_refused(refusal_of: RefusalOf, words: tuple[str, ...], complaint: str) -> None:
    assert complaint in refusal_of("launch", *words)


@pytest.mark.soak
def test_the_torchrun_command_trains(folder: Path, run_command: RunCommand) -> None:
    words = ("launch", "torchrun", "job.yaml", "--nodes", "1", "--set", "name=it's; $(touch pwned)")
    refused = run_command(*words)
    assert (refused.exit_code, refused.stdout) == (2, "")
    launched = run_command(*words[:-1], "metrics={}")
    repository = str(Path(__file__).parents[2])
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": repository, "HOME": str(folder)}
    run = subprocess.run(
        ["sh", "-c", launched.stdout], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stderr
    assert (folder / "runs" / "job-0001" / "result.json").is_file()
    assert (folder / "runs" / "job-0001" / "logs" / "rank-1.log").is_file()
