"""`horovodrun` starts scripts that import `horovod.torch`, and refuses what it cannot start with the command that
can."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import meshwright.compat.horovod as hvd
from meshwright.compat.horovod.launcher.arguments import local_slots, parse
from meshwright.compat.horovod.launcher.command import launch
from meshwright.compat.horovod.launcher.run_function import run
from meshwright.errors import InputError


def test_the_command_line_of_horovodrun_is_understood() -> None:
    options = parse(["-np", "2", "-H", "localhost:4", "--gloo", "--cycle-time-ms", "3.5", "train.py", "-np", "7"])
    assert options.command == (sys.executable, "train.py", "-np", "7"), "what follows the script is the script's"
    assert (options.np, options.elastic) == (2, False)
    assert options.variables == {"HOROVOD_CYCLE_TIME": "3.5"}
    assert parse(["-H", "localhost:3", "--", "python", "-m", "train"]).np == 3
    elastic = parse(["-np", "2", "--min-np", "1", "--max-np", "4", "--fusion-threshold-mb", "32", "train.py"])
    assert (elastic.elastic, elastic.min_np, elastic.max_np) == (True, 1, 4)
    assert elastic.variables == {"HOROVOD_FUSION_THRESHOLD": str(32 * 2**20)}
    assert local_slots(["localhost:2", "", "127.0.0.1", "# comment"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-np", "2"], "needs a script"),
        (["-np", "-1", "a.py"], "start 1 to"),
        (["-np", "0", "a.py"], "-np 0: start 1 to"),
        (["-np", "2", "--min-np", "0", "a.py"], "--min-np 0: start 1 to"),
        (["-np", "3", "-H", "localhost:2", "a.py"], "write -H localhost:3"),
        (["-np", "1", "--min-np", "2", "a.py"], "each has to be at most the next"),
        (["-np", "2", "--mpi", "a.py"], "mpirun -np 2 -x MASTER_ADDR=localhost"),
        (["-np", "4", "-H", "far:2,away:2", "a.py", "--lr", "1"], "torchrun --nnodes 2 --nproc-per-node 2"),
        (["-np", "4", "-H", "far:2,away:2", "a.py"], "mpirun -np 4 -H far:2,away:2 -x MASTER_ADDR=far"),
        (["--hostfile", "/nowhere", "a.py"], "No such file"),
        (["-H", "localhost:x", "a.py"], "localhost:2"),
    ],
)
def test_what_cannot_be_started_is_refused_with_what_can(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(arguments)


@pytest.mark.parametrize("command", [["nowhere.py"], ["python", "nowhere.py", "--lr", "1"]])
def test_a_script_that_does_not_exist_is_refused_before_ranks_are_started(command: list[str]) -> None:
    with pytest.raises(InputError, match=r"nowhere\.py: there is no such script"):
        launch(["-np", "2", *command])


def test_a_program_that_does_not_exist_is_refused_before_ranks_are_started() -> None:
    with pytest.raises(InputError, match="/nope: there is no such program"):
        launch(["-np", "2", "/nope"])


SCRIPT = """
import os, signal, sys
import torch
import horovod
import horovod.torch as hvd
from horovod.torch.mpi_ops import allreduce
from horovod.common.exceptions import HorovodInternalError
import horovod.torch.elastic

assert HorovodInternalError is hvd.HorovodInternalError and horovod.__version__ == "0.28.1"
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
dataset = torch.arange(48.0).view(12, 4) / 48
sampler = hvd.elastic.ElasticSampler(dataset, shuffle=False)
resets = []

@hvd.elastic.run
def train(state):
    for index in sampler:
        if state.batch == 3 and hvd.rank() == 1 and not os.path.exists(sys.argv[1]):
            open(sys.argv[1], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(dataset[index : index + 1]).sum().backward()
        optimizer.step()
        sampler.record_batch(state.batch, 1)
        state.seen = state.seen + [hvd.allgather(torch.tensor([index])).tolist()]
        state.batch += 1
        if state.batch % 2 == 0:  # batch 2 is lost when the worker dies at batch 3
            state.commit()

state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=0, seen=[])
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
train(state)
weights = hvd.allgather(model.weight.detach())
assert torch.equal(weights[0], weights[1]), weights
print("RESULT", hvd.rank(), hvd.size(), resets, state.seen, flush=True)
"""


@pytest.mark.soak
def test_an_elastic_job_goes_on_from_the_last_commit_after_a_worker_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "meshwright.compat.horovod", "-np", "2", "--min-np", "1"]
    done = subprocess.run(
        [*launcher, str(script), str(tmp_path / "was killed")],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    assert "the worker of slot 1 was killed by SIGKILL" in done.stderr
    seen = [[2 * batch, 2 * batch + 1] for batch in range(6)]  # every sample once, also those after the commit
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT" in line]
    assert sorted(lines) == [f"0 2 [2] {seen}", f"1 2 [] {seen}"]


GROWING = """
import sys
import torch
import horovod.torch as hvd

hvd.init()
resets = []

@hvd.elastic.run
def train(state):
    while hvd.size() == 1:
        state.batch += 1
        if state.batch == 3:
            open(sys.argv[1], "w").write("localhost:2")
        state.commit()
    return hvd.allreduce(torch.tensor([float(state.batch)])).item() == state.batch

state = hvd.elastic.TorchState(torch.nn.Linear(1, 1), None, batch=0)
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
print("RESULT", hvd.size(), train(state), resets, state.batch >= 3, flush=True)
"""


@pytest.mark.soak
def test_a_host_that_is_discovered_gets_a_worker_with_the_state_of_the_others(tmp_path: Path) -> None:
    script, hosts, discovery = tmp_path / "train.py", tmp_path / "hosts", tmp_path / "discovery.sh"
    script.write_text(GROWING)
    hosts.write_text("localhost:1")
    discovery.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discovery.chmod(0o755)
    launcher = [sys.executable, "-m", "meshwright.compat.horovod", "-np", "1", "--max-np", "2"]
    done = subprocess.run(
        [*launcher, "--host-discovery-script", str(discovery), str(script), str(hosts)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT" in line]
    assert sorted(lines) == ["1 True [2] True", "2 True [] True"]


FAILING = """
import sys
import horovod.torch as hvd
hvd.init()
if hvd.rank() == 1:
    sys.exit(7)
import torch
hvd.allreduce(torch.ones(1))
"""


@pytest.mark.soak
def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILING)
    command = [sys.executable, "-m", "meshwright", "horovodrun", "-np", "2", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, cwd=Path(__file__).parents[3]
    )
    assert done.returncode == 1
    assert "rank 1 of 2 ended with exit code 7" in done.stderr
    assert "rank 0 of 2 ended with exit code 1" in done.stderr
    assert "rank 1 has shut down" in done.stderr


def _scaled_rank(factor: int, shift: int) -> tuple[int, float]:
    hvd.init()
    return hvd.rank() * factor + shift, float(hvd.allreduce(torch.tensor(1.0 + hvd.rank()), op=hvd.Sum))


@pytest.mark.soak
def test_a_function_is_called_on_new_ranks_and_its_values_are_returned() -> None:
    assert run(_scaled_rank, args=(10,), kwargs={"shift": 1}, np=2) == [(1, 3.0), (11, 3.0)]
    with pytest.raises(InputError, match="no option reset_limit"):
        run(_scaled_rank, reset_limit=3)
