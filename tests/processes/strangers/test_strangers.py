"""Another user of the machine attacks runs under the launchers of Meshwright: nothing of his is answered, executed or
changed, and the run ends with the weights of an undisturbed one, bit for bit."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.forking.environment import REPOSITORY
from tests.processes.launchers.runs import TRAIN, weights, write_job
from tests.processes.nodes.ports import free_port
from tests.processes.processes import tree
from tests.processes.strangers.attack import Attack, attacked, listening_ports
from tests.report.made_up_run import make_run
from tests.soaked import all_but

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

FEWEST_TRIES = 200
_LIMIT_S = 500.0
STEPS = 6
EXECUTED = Path("/tmp/meshwright-stranger-was-here")
HOROVODRUN = [sys.executable, "-m", "meshwright", "horovodrun", "-np", "2"]

TORCH_STORE = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print("ready", flush=True)
time.sleep(600)
"""
SCRIPT = """
import hashlib, sys, time
import torch
import horovod.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, batch=0)

@hvd.elastic.run
def train(state):
    while state.batch < 60:
        torch.manual_seed(state.batch * 2 + hvd.rank())
        optimizer.zero_grad()
        model(torch.rand(4, 8)).square().mean().backward()
        optimizer.step()
        others = hvd.allgather_object((state.batch, hvd.rank()))
        assert others == [(state.batch, 0), (state.batch, 1)], others
        assert hvd.broadcast_object({"batch": state.batch}, 0) == {"batch": state.batch}
        time.sleep(0.03)
        state.batch += 1
        state.commit()

train(state)
if hvd.rank() == 0:
    print("weights", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""
FUNCTION = """
import hashlib, time
import torch
import meshwright as mw

def train():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.zeros(1000)
    for step in range(100):
        torch.manual_seed(2 * step + dist.get_rank())
        tensor = torch.rand(1000)
        dist.all_reduce(tensor)
        group = dist.new_group([0, 1]) if step % 20 == 0 else group
        dist.all_reduce(tensor, group=group)
        total += tensor
        time.sleep(0.02)
    return hashlib.sha256(total.numpy().tobytes()).hexdigest()

if __name__ == "__main__":
    print("weights", mw.launch(train, ranks=2))
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "TORCH_CPP_LOG_LEVEL": "FATAL"}


def run(command: Sequence[str | Path], folder: Path, is_attacked: bool) -> tuple[str, Attack]:
    """Returns what the command prints."""
    code, out, err, attack = outcome(command, folder, is_attacked)
    assert code == 0, err
    return out, attack


def outcome(
    command: Sequence[str | Path], folder: Path, is_attacked: bool, on_root: Mapping[str, Any] | None = None
) -> tuple[int, str, str, Attack]:
    """Returns the exit code and what is printed to stdout and stderr."""
    with subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(),
    ) as process:
        attack = Attack()
        if is_attacked:
            with attacked(process.pid, folder, on_root) as attack:
                out, err = process.communicate(timeout=_LIMIT_S)
        else:
            out, err = process.communicate(timeout=_LIMIT_S)
    return process.returncode, out, err, attack


def check(attack: Attack) -> None:
    assert attack.tries >= FEWEST_TRIES
    assert attack.reached == {}
    assert not EXECUTED.exists()


def test_the_stranger_reaches_a_store_that_admits_everybody() -> None:
    """Otherwise the other tests would prove nothing."""
    with subprocess.Popen([sys.executable, "-c", TORCH_STORE], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            with attacked(process.pid) as attack:
                while not attack.ports & listening_ports(tree(process.pid)):
                    pass
        finally:
            process.kill()
    assert any(name.endswith("store") for name in attack.reached)


SERVERS = {
    "axes": {"replicate": 2},
    "gradients": {"servers": 1, "updates": "synchronous"},
    "compute": {"threads": 1},
}
NODES = f"{' '.join(TRAIN)} $0 --nodes 2 --rendezvous 127.0.0.1:PORT --node-rank"
TWO_NODES = ["sh", "-c", f"{NODES} 1 & {NODES} 0 && wait $!"]
LAUNCHERS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "train": (TRAIN, {}),
    "servers": (TRAIN, {"plan": SERVERS}),
    "nodes": (TWO_NODES, {"cluster": "1xcpu"}),
}


@pytest.mark.parametrize("launcher", all_but({"train"}, LAUNCHERS))
def test_a_stranger_changes_no_bit_of_a_training(launcher: str, open_folder: Path) -> None:
    words, changes = LAUNCHERS[launcher]
    command = [word.replace("PORT", str(free_port())) for word in words]
    folders = {name: open_folder / name for name in ("undisturbed", "attacked")}
    for name, folder in folders.items():
        job = write_job(folder, train={"steps": STEPS, "global_batch": 16, "seed": 0}, **changes)
        _, attack = run([*command, job], folder, name == "attacked")
    check(attack)
    assert weights(folders["attacked"], STEPS) == weights(folders["undisturbed"], STEPS) != {}


@pytest.mark.soak
def test_a_stranger_reads_nothing_of_a_run_that_is_watched(open_folder: Path) -> None:
    make_run(open_folder / "run", ranks=2, steps=10)
    command = [*TRAIN[:-1], "watch", open_folder / "run"]
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    ) as process:
        try:
            assert process.stdout is not None
            address = next(word for line in process.stdout for word in line.split() if word.startswith("http://"))
            with attacked(process.pid, open_folder / "run") as attack:
                for _ in range(40):  # its user is answered all the time
                    with urllib.request.urlopen(address, timeout=60) as page:
                        assert page.read(100)
        finally:
            process.send_signal(signal.SIGINT)
    check(attack)


SCRIPTS = {
    "horovodrun": ([*HOROVODRUN], SCRIPT),
    "elastic": ([*HOROVODRUN, "--min-np", "2", "--max-np", "2"], SCRIPT),
    "mw.launch": ([sys.executable], FUNCTION),
}


@pytest.mark.parametrize("launcher", all_but({"horovodrun"}, SCRIPTS))
def test_a_stranger_changes_no_bit_of_a_script(launcher: str, open_folder: Path) -> None:
    command, text = SCRIPTS[launcher]
    script = open_folder / "script.py"
    script.write_text(text)
    undisturbed, _ = run([*command, script], open_folder, False)
    disturbed, attack = run([*command, script], open_folder, True)
    check(attack)
    assert "weights" in undisturbed
    assert disturbed == undisturbed
