"""A rank joins the process group under torchrun, srun and in Ray Train, and runs alone without a launcher."""

import json
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from meshwright.errors import InputError
from meshwright.processes.environment import Environment, environment_variables
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.rank import run_rank
from meshwright.processes.world import World, is_launched, join, leave
from tests.forking.forked import start
from tests.ranks import RankPool


def torchrun(case: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["--standalone", "--nproc-per-node", "2", "--log-dir", str(folder / "elastic")]
    process = start("tests.forking.forked:torchrun", *command, "-m", "tests.processes.worker", case, str(folder))
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(command, process.poll() or 0, out, err)


def test_a_failed_rank_is_named_by_its_number_in_the_process_group() -> None:
    class EndError(Exception):
        pass

    def renumbered(device: str, timeout_s: float) -> World:
        return World(2, 0, 4, 2, 0, torch.device(device), None)

    def fail(world: World, heartbeat: Heartbeat) -> None:
        raise ValueError("wrong")

    def end(error: BaseException, env: Environment, heartbeat: Heartbeat) -> NoReturn:
        raise EndError(env.rank, str(error))

    with environment_variables({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}), pytest.raises(EndError) as raised:
        run_rank(fail, "cpu", 10, renumbered, end)
    assert raised.value.args == (2, "wrong")


@pytest.mark.soak
def test_torchrun_ranks_join(tmp_path: Path) -> None:
    run = torchrun("plain", tmp_path)
    assert run.returncode == 0, run.stderr
    sizes = [json.loads((tmp_path / f"report-{rank}-0.json").read_text())["size"] for rank in (0, 1)]
    assert sizes == [2, 2]
    assert not list(tmp_path.glob("*.log"))


@pytest.mark.soak
def test_a_failure_under_torchrun_is_reported_in_one_line(tmp_path: Path) -> None:
    run = torchrun("early", tmp_path)
    assert run.returncode != 0
    assert "rank 1 failed in start-up: KeyError: 'head.weight' (worker.py, line " in run.stderr


def test_without_a_launcher_there_is_no_process_group() -> None:
    assert not is_launched()
    world = join("cpu", 5)
    assert (world.rank, world.size, world.store) == (0, 1, None)
    assert not dist.is_initialized()
    leave()
    leave()


def test_without_a_launcher_a_rank_runs_in_this_process() -> None:
    steps: list[int] = []

    def main(world: World, heartbeat: Heartbeat) -> None:
        heartbeat.update(3, "forward")
        steps.append(heartbeat.step)

    run_rank(main, "cpu", 5)
    assert steps == [3]


def test_a_process_that_torchrun_should_have_started_is_not_taken_for_a_single_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NODE_RANK", "1")
    with pytest.raises(InputError, match="PET_NNODES=2, PET_NODE_RANK=1: these variables are for torchrun"):
        join("cpu", 5)


def join_the_group_of_ray(rank: int, size: int) -> tuple[int, int, int]:
    """Joins with the variables of a worker of Ray Train, which has made the process group."""
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": rank}
    with environment_variables({name: str(value) for name, value in variables.items()}):
        world = join("cpu", 5)
    return world.rank, world.local_rank, world.local_size


def test_the_group_of_ray_train_is_used_with_its_places(two: RankPool) -> None:
    assert two.run(join_the_group_of_ray) == [(0, 0, 1), (1, 0, 1)]


def join_the_group_of_lightning(rank: int, size: int) -> tuple[int, int]:
    """Lightning's own launcher sets these variables, and not RANK."""
    with environment_variables({"LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "NODE_RANK": "0"}):
        world = join("cpu", 5)
    return world.rank, world.size


def test_the_group_of_lightning_is_used_without_all_variables_of_torchrun(two: RankPool) -> None:
    assert two.run(join_the_group_of_lightning) == [(0, 2), (1, 2)]


def join_under_slurm_twice(rank: int, size: int, folder: str) -> list[tuple[int, int, float]]:
    """Leaves the pool's group, and joins the ranks of a step of Slurm, leaves them and joins again."""
    leave()
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(size), "SLURM_NODEID": "0"}
    ids = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_TASKS_PER_NODE": str(size)}
    results = []
    with pytest.MonkeyPatch.context() as patch, environment_variables({**step, **ids}):
        patch.setattr("tempfile.tempdir", folder)
        for _ in range(2):
            world, total = join("cpu", 60), torch.ones(1)
            dist.all_reduce(total)
            results.append((world.rank, world.local_size, float(total)))
            dist.barrier()
            leave()
    return results


def test_ranks_join_by_the_variables_of_slurm_and_may_join_again(tmp_path: Path) -> None:
    pool = RankPool(2)
    try:
        assert pool.run(join_under_slurm_twice, str(tmp_path)) == [[(0, 2, 2.0)] * 2, [(1, 2, 2.0)] * 2]
    finally:
        pool.close()


def send_cpu_tensors(rank: int, size: int) -> tuple[str, float, float]:
    """Joins a process group whose backend sends GPU tensors only, as NCCL does. Returns the error that a CPU tensor
    gives before, and sums over the group and over a group that is made from it."""
    value = torch.ones(1)
    with pytest.raises(RuntimeError) as error:
        dist.all_reduce(value)
    world = join("cpu", 5)
    assert (world.rank, world.size, world.local_size) == (rank, size, size)
    assert join("cpu", 5) == world
    dist.all_reduce(value)
    part = torch.ones(1)
    dist.all_reduce(part, group=dist.new_group(list(range(size))))
    return str(error.value), float(value), float(part)


def test_a_group_that_the_script_has_made_is_joined_whatever_its_backend() -> None:
    pool = RankPool(2, backend="cuda:gloo")
    try:
        for message, total, part in pool.run(send_cpu_tensors):
            assert "No backend type associated with device type cpu" in message
            assert (total, part) == (2.0, 2.0)
    finally:
        pool.close()
