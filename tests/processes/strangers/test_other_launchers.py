"""Another user of the machine attacks runs of torchrun and OpenMPI's mpirun. What these programs listen on is theirs,
and torchrun's store admits everybody. Nobody reaches what our ranks listen on."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes.launchers.runs import TRAIN, need, weights, write_job
from tests.processes.launchers.test_mpirun import OPEN_MPI
from tests.processes.nodes.ports import free_port
from tests.processes.strangers.attack import Attack
from tests.processes.strangers.test_strangers import EXECUTED, FEWEST_TRIES, STEPS, outcome, run

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]

# With an address and a port, torchrun's rendezvous reads no pickles.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
TORCHRUN += ["--master-addr", "localhost", "--master-port"]
SESSION = """
import hashlib, os, time
import torch
import meshwright as mw

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plan = {"axes": {"replicate": 2}}
session = mw.parallelize(model, optimizer, loss=torch.nn.functional.mse_loss, plan=plan, timeout_s=30)
samples = torch.utils.data.TensorDataset(torch.rand(640, 8), torch.rand(640, 8))
for batch in session.batches(samples, epochs=1, global_batch=8):
    session.step(batch)
    time.sleep(0.05)
weights = session.state_dict()["weight"]
if os.environ["RANK"] == "0":
    print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
"""


def check_that_only_the_launcher_was_reached(attack: Attack) -> None:
    assert attack.tries >= FEWEST_TRIES
    theirs = tuple(f"port {port}, " for port in attack.root_ports)
    assert [name for name in attack.reached if not name.startswith(theirs)] == []
    assert not EXECUTED.exists()


def test_a_stranger_changes_no_bit_under_mpirun(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("mpirun.openmpi")
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    folders = {name: open_folder / name for name in ("undisturbed", "attacked")}
    for name, folder in folders.items():
        job = write_job(folder, train={"steps": STEPS, "global_batch": 16, "seed": 0})
        _, attack = run(["mpirun.openmpi", "-n", "2", *TRAIN, job], folder, name == "attacked")
    check_that_only_the_launcher_was_reached(attack)
    assert weights(folders["attacked"], STEPS) == weights(folders["undisturbed"], STEPS) != {}


# What a stranger does to torchrun's store, of which the first leaves it alone. (Where there is no DNS, torch takes
# seconds to write a warning about a message that it does not understand, and serves nobody meanwhile.)
ON_TORCHRUN: dict[str, dict[str, Any]] = {
    "ranks": {"messages": [], "is_flooded": False},
    "store": {"host": "::1", "messages": ["store"], "is_flooded": False},
}


@pytest.mark.parametrize("attacked", ON_TORCHRUN)
def test_a_stranger_changes_no_bit_under_torchrun(attacked: str, open_folder: Path) -> None:
    script = open_folder / "script.py"
    script.write_text(SESSION)
    undisturbed, _ = run([*TORCHRUN, str(free_port()), script], open_folder, False)
    command = [*TORCHRUN, str(free_port()), str(script)]
    code, disturbed, err, attack = outcome(command, open_folder, True, ON_TORCHRUN[attacked])
    check_that_only_the_launcher_was_reached(attack)
    assert bool(attack.reached) == (attacked == "store")
    if code and attacked == "store":  # who can write to the store can end the run
        assert "was not written with the token of this run" in err
    else:
        assert code == 0, err
        assert "weights" in undisturbed
        assert disturbed == undisturbed
