"""A job on a Ray cluster of two nodes ends with the weights of `meshwright train`, also when a worker is killed, and a
user's `TorchTrainer` loop may call `mw.parallelize`. Ray runs in an environment of its own (`make ray`)."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from meshwright.processes.loopback import interface
from tests.forking.forked import Process, start_command

REPOSITORY = Path(__file__).parents[3]
RAY = Path(os.environ.get("MESHWRIGHT_TEST_RAY", REPOSITORY / ".venv-ray"))
IS_INSTALLED = (RAY / "ready").exists() or "MESHWRIGHT_TEST_RAY" in os.environ
NODES, JOBS = Path(__file__).with_name("two_nodes.py"), Path(__file__).with_name("jobs.py")
PlainState = Callable[[], list[bytes]]
STEPS, KILLED_RANK, KILLED_AT = 8, 1, 5
JOB = (
    *("mnist", "--json", "--plan", "{folder}/plan.yaml", "--set", "output={folder}/{name}"),
    *("--set", "data.synthetic=true", "--set", f"train.steps={STEPS}", "--set", "train.global_batch=32"),
    *("--set", "checkpoint={{every_steps: 3}}", "--set", "data.eval=null", "--set", "metrics={{}}"),
    *("--set", "log.tensorboard=false"),
)

pytestmark = [
    pytest.mark.timeout(900),  # Ray starts several processes for each run
    pytest.mark.skipif(not IS_INSTALLED, reason="Ray is not installed: make ray"),
]


@pytest.fixture(scope="module")
def variables(plain_process: tuple[Process, Path]) -> Iterator[Mapping[str, str]]:
    """Starts the Ray cluster, and yields the environment variables of processes that use it."""
    variables = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "GLOO_SOCKET_IFNAME": interface(),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # without it, Ray replaces the loopback address by another one
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [str(RAY / "bin" / "python"), str(NODES)]
    cluster = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)
    assert cluster.stdin is not None
    assert cluster.stdout is not None
    try:
        yield {**variables, "RAY_ADDRESS": cluster.stdout.readline().strip()}
    finally:
        cluster.stdin.close()
        cluster.wait(timeout=120)


@pytest.fixture(scope="module")
def plain_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Process, Path]:
    """Starts to train without Ray, while the cluster starts. Returns the process and the run folder."""
    folder = tmp_path_factory.mktemp("plain")
    return start_command(["train", *words_of_job(folder, "plain")]), folder / "plain" / "mnist-0001"


@pytest.fixture(scope="module")
def plain_state(plain_process: tuple[Process, Path]) -> PlainState:
    """Returns a function that returns the end of a run without Ray, which goes on meanwhile."""
    process, run = plain_process

    @cache
    def wait() -> list[bytes]:
        _, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        return final_state(run)

    return wait


def test_a_job_ends_with_the_same_weights(
    tmp_path: Path, variables: Mapping[str, str], plain_state: PlainState
) -> None:
    result = train(tmp_path, "ray", variables, "--on", "ray")
    assert (result["steps"], result["restarts"]) == (STEPS, 0)
    assert final_state(Path(str(result["run"]))) == plain_state()
    assert list((tmp_path / "ray" / ".ray").iterdir()) == [], "nothing of Ray's files is left"


@pytest.mark.soak
def test_a_job_whose_worker_is_killed_ends_with_the_same_weights(
    tmp_path: Path, variables: Mapping[str, str], plain_state: PlainState
) -> None:
    callback = {"call": f"{JOBS}:KillOnce", "rank": KILLED_RANK, "step": KILLED_AT, "file": str(tmp_path / "killed")}
    callbacks = ("--set", f"callbacks={json.dumps([callback])}")
    result = train(tmp_path, "ray", variables, "--on", "ray", "--workers", "2", *callbacks)
    assert (tmp_path / "killed").exists()
    assert (result["steps"], result["restarts"]) == (STEPS, 1)
    run = Path(str(result["run"]))
    assert run.name == "mnist-0001", "the run was resumed, and not started again"
    assert final_state(run) == plain_state()


@pytest.mark.soak
def test_wrong_input_of_the_workers_ends_with_exit_code_2(tmp_path: Path, variables: Mapping[str, str]) -> None:
    process = run_command(tmp_path, "ray", variables, "--on", "ray", "--set", "model.width=3")
    assert process.returncode == 2, process.stderr
    assert "width" in process.stderr.splitlines()[-1]


@pytest.mark.soak
def test_a_users_own_loop_may_call_parallelize(tmp_path: Path, variables: Mapping[str, str]) -> None:
    command = [str(RAY / "bin" / "python"), str(JOBS), str(tmp_path)]
    process = subprocess.run(command, env=dict(variables), capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    on_ray, in_ranks = process.stdout.split()[-2:]
    assert len(on_ray) == 64
    assert on_ray == in_ranks


def train(folder: Path, name: str, variables: Mapping[str, str], *options: str) -> dict[str, object]:
    """Trains the job, and returns its result."""
    process = run_command(folder, name, variables, *options)
    assert process.returncode == 0, process.stderr
    result: dict[str, object] = json.loads(process.stdout.splitlines()[-1])
    return result


def run_command(
    folder: Path, name: str, variables: Mapping[str, str], *options: str
) -> subprocess.CompletedProcess[str]:
    command = [str(RAY / "bin" / "python"), "-m", "meshwright", "train", *words_of_job(folder, name), *options]
    return subprocess.run(command, cwd=REPOSITORY, env=dict(variables), capture_output=True, text=True, timeout=400)


def words_of_job(folder: Path, name: str) -> list[str]:
    (folder / "plan.yaml").write_text("axes: {replicate: 2}\ncompute: {threads: 1}\n")
    return [word.format(folder=folder, name=name) for word in JOB]


def final_state(run: Path) -> list[bytes]:
    """Returns the bytes of the last checkpoint: weights, optimizer and random numbers of both ranks."""
    files = sorted((run / "checkpoints" / f"step-{STEPS:08d}").glob("rank-*.bin"))
    assert len(files) == 2
    return [file.read_bytes() for file in files]
