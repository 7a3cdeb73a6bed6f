"""Two machines under torchrun: the mnist job survives a cut cable and goes on alone if the other machine is taken away,
and `doctor` measures the link between them."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.checkpoint.load import find_newest_valid, load
from meshwright.cluster.file import load_cluster
from meshwright.train.output.folder import RunFolder
from meshwright.workloads.mnist import Net
from validation.bench.faults.moments import wait_for
from validation.machines.namespaces import Machine, two_machines, why_not

pytestmark = pytest.mark.soak
STEPS, CUT_S = 30, 10
# A rank that is alone on its machine would take both cores, and the search may choose another layout of images: both
# change the order of sums.
REPLICAS = ["--set", "plan={axes: {replicate: 2}, compute: {threads: 1}}"]


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    if reason := why_not():
        pytest.skip(reason)
    with two_machines() as pair:
        yield pair


def train_arguments(folder: Path) -> list[str]:
    settings = {
        "data.synthetic": "true",
        "data.eval": "null",
        "metrics": "{}",
        "optimizer.lr": 0.01,
        "train.steps": STEPS,
        "train.global_batch": 16,
        "train.timeout_s": 20,
        "checkpoint": "{every_steps: 4}",
        "log": "{every_steps: 1, tensorboard: false}",
        "output": folder,
    }
    return ["train", "mnist", *(word for name, value in settings.items() for word in ("--set", f"{name}={value}"))]


def torchrun(
    machine: Machine, first: Machine, folder: Path, nodes: str, words: list[str] | None = None
) -> "subprocess.Popen[str]":
    """Starts meshwright with these arguments, by default those of a run."""
    # The name of this host is that of both machines, so torchrun has to be told which one serves the rendezvous.
    options = {
        "--nnodes": nodes,
        "--nproc-per-node": "1",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"{first.address}:29500",
        "--rdzv-id": "mnist",
        "--rdzv-conf": f"is_host={int(machine is first)},last_call_timeout=3",
        "--local-addr": machine.address,
        "--max-restarts": "3",
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", *(word for pair in options.items() for word in pair)]
    log = folder / f"{machine.name}.log"
    return machine.start(*launcher, "-m", "meshwright", *(words or train_arguments(folder / "runs")), log=log)


def weights_of(run: RunFolder) -> dict[str, Tensor]:
    newest = find_newest_valid(run.checkpoints)
    assert newest.path is not None
    assert newest.manifest is not None
    assert newest.manifest.step == STEPS
    model = Net()
    load(newest.path, newest.manifest, model, None)
    return model.state_dict()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights that two ranks of this machine train, in fp32."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, "-m", "meshwright", *train_arguments(folder), "--cluster", "2xcpu", *REPLICAS]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    return weights_of(RunFolder(folder / "mnist-0001"))


def test_a_cable_that_is_cut_for_ten_seconds_changes_no_bit(
    machines: tuple[Machine, Machine], undisturbed: dict[str, Tensor], tmp_path: Path
) -> None:
    words = [*train_arguments(tmp_path / "runs"), *REPLICAS]
    processes = [torchrun(machine, machines[0], tmp_path, "2", words) for machine in machines]
    run = RunFolder(tmp_path / "runs" / "mnist-0001")
    wait_for(run, rank=1, step=8)
    machines[1].cut()
    time.sleep(CUT_S)
    machines[1].restore()
    assert [process.wait(500) for process in processes] == [0, 0], logs(tmp_path)
    assert "resuming" not in logs(tmp_path)
    torch.testing.assert_close(weights_of(run), undisturbed, rtol=0, atol=0)


def test_a_machine_that_is_taken_away_leaves_the_other_to_go_on(
    machines: tuple[Machine, Machine], undisturbed: dict[str, Tensor], tmp_path: Path
) -> None:
    first, second = machines
    process = torchrun(first, first, tmp_path, nodes="1:2")
    torchrun(second, first, tmp_path, nodes="1:2")
    run = RunFolder(tmp_path / "runs" / "mnist-0001")
    wait_for(run, rank=1, step=12)
    second.take_away()
    assert process.wait(500) == 0, logs(tmp_path)
    assert "on 1 CPU rank (one rank · fp32)" in logs(tmp_path)
    for name, weight in weights_of(run).items():
        error = (weight - undisturbed[name]).norm() / undisturbed[name].norm()
        assert error < 1e-5, name


def logs(folder: Path) -> Any:
    return "\n".join(file.read_text() for file in sorted(folder.glob("*.log")))


def test_doctor_measures_the_link_between_the_machines(
    machines: tuple[Machine, Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for machine in machines:
        machine.shape("100mbit")
    processes = [torchrun(machine, machines[0], tmp_path, "2", ["doctor", "--json"]) for machine in machines]
    assert [process.wait(500) for process in processes] == [0, 0], logs(tmp_path)
    report = json.loads(next(line for line in logs(tmp_path).splitlines() if line.startswith("{")))
    assert [machine["ranks"] for machine in report["machines"]] == [[0], [1]]
    assert 8e6 < report["machines"][1]["bandwidth_bytes_per_s"] < 13e6
    assert {(curve["ranks"], curve["nodes"]) for curve in report["links"][0]["curves"]["all_reduce"]} == {(2, 2)}
    (file,) = (tmp_path / "cache" / "meshwright").glob("machines-*.yaml")
    assert load_cluster(str(file)).link is not None


# Each rank prints its numbers, the machines and the groups of its mesh, and how much of 8 MiB its machine sends when a
# reducer averages them.
PRINT_TIERS = """
import os
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.collectives.reducers import make_reducer
from meshwright.collectives.shared_memory.two_level import machines_of
from meshwright.processes.world import join, leave
from meshwright.parallel.mesh import build_mesh
from meshwright.plan import Plan

world = join("cpu", 60)
print("numbers", os.environ["RANK"], world.rank, flush=True)
mesh = build_mesh(Plan.model_validate({"axes": {"replicate": 2, "tensor": 2}}), "cpu", world.size)
groups = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in ("tensor", "replicate")]
print("groups", world.rank, *groups, machines_of(dist.group.WORLD), flush=True)
counter = next(file for file in Path("/sys/class/net").glob("*/statistics/tx_bytes") if file.parts[-3] != "lo")
for algorithm in ("two_level", "auto"):
    reducer, _ = make_reducer(algorithm, dist.group.WORLD, world.device)
    dist.barrier()
    before = int(counter.read_text())
    bucket = torch.full((2**21,), float(world.rank))
    reducer.start(bucket, 0)
    reducer.finish()
    dist.barrier()
    share = (int(counter.read_text()) - before) / 2**23
    print("sent", type(reducer).__name__, f"{share:.1f}", bool((bucket == 1.5).all()), flush=True)
    reducer.close()
leave()
"""


def test_ranks_that_a_launcher_numbers_across_machines_are_laid_out_by_machine(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    processes = []
    for rank in range(4):
        machine = machines[rank % 2]
        variables = {
            "RANK": rank,
            "WORLD_SIZE": 4,
            "LOCAL_RANK": rank // 2,
            "LOCAL_WORLD_SIZE": 2,
            "MASTER_PORT": 29500,
        }
        environment = {"MASTER_ADDR": machines[0].address, **{name: str(value) for name, value in variables.items()}}
        log = tmp_path / f"{rank}.log"
        processes.append(machine.start(sys.executable, "-c", PRINT_TIERS, log=log, **environment))
    assert [process.wait(100) for process in processes] == [0] * 4, logs(tmp_path)
    lines = sorted(logs(tmp_path).splitlines())
    assert [line for line in lines if line.startswith("numbers")] == [
        "numbers 0 0",
        "numbers 1 2",
        "numbers 2 1",
        "numbers 3 3",
    ]
    assert [line for line in lines if line.startswith("groups")] == [
        "groups 0 [0, 1] [0, 2] [[0, 1], [2, 3]]",
        "groups 1 [0, 1] [1, 3] [[0, 1], [2, 3]]",
        "groups 2 [2, 3] [0, 2] [[0, 1], [2, 3]]",
        "groups 3 [2, 3] [1, 3] [[0, 1], [2, 3]]",
    ]
    # Each of m = 2 machines sends 2(m - 1)/m of the tensor; a ring over these four ranks would send 1.5 times of it.
    assert [line for line in lines if line.startswith("sent")] == [
        *["sent ScheduledReducer 1.0 True"] * 4,
        *["sent TwoLevelMemoryReducer 1.0 True"] * 4,
    ]
