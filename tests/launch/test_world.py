"""A rank joins the process group under torchrun, and runs alone without a launcher."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.launch.heartbeat import Heartbeat
from meshwright.launch.rank import run_rank
from meshwright.launch.world import World, is_launched, join, leave
from tests.forking.forked import start
from tests.ranks import RankPool


def torchrun(case: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["--standalone", "--nproc-per-node", "2", "--log-dir", str(folder / "elastic")]
    process = start("tests.forking.forked:torchrun", *command, "-m", "tests.launch.worker", case, str(folder))
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(command, process.poll() or 0, out, err)


@pytest.mark.soak
def test_torchrun_ranks_join(tmp_path: Path) -> None:
    run = torchrun("plain", tmp_path)
    assert run.returncode == 0, run.stderr
    sizes = [json.loads((tmp_path / f"report-{rank}-0.json").read_text())["size"] for rank in (0, 1)]
    assert sizes == [2, 2]
    assert not list(tmp_path.glob("*.log"))


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
