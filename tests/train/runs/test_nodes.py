"""Two commands `meshwright train --nodes 2` on this machine train as one run, also when one of them is killed."""

import signal
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint.load import find_newest_valid
from meshwright.processes.loopback import connect_store
from meshwright.train.output.folder import RunFolder
from tests.forking.forked import Process
from tests.processes.nodes.ports import free_port
from tests.ranks import run_ranks
from tests.train import commands
from tests.train.runs.test_faults import JOB, STEPS, assert_same, final_state, train_on_rank
from validation.bench.faults.moments import Moment, wait_for

pytestmark = pytest.mark.usefixtures("nothing_left")

TWO_RANKS: dict[str, Any] = {
    **JOB,
    "plan": {"axes": {"replicate": 2}, "gradients": {"bucket_bytes": 8000, "algorithm": "native"}},
}
TWO_RANKS["plan"]["compute"] = {"threads": 1}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The end of a run of two ranks that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_ranks(train_on_rank, 2, TWO_RANKS, folder)
    return final_state(RunFolder(folder))


class Machines:
    """Starts the command of each machine, all of them on this one, with one rank each."""

    def __init__(self, folder: Path, nodes: str = "2", job: dict[str, Any] = TWO_RANKS) -> None:
        self.port = free_port()
        self._options = ("--nodes", nodes, "--rendezvous", f"127.0.0.1:{self.port}")
        self._folder = folder
        self._job = job
        self.run = RunFolder(folder / "runs" / "toy-0001")

    def start(self, node_rank: int) -> Process:
        return commands.start(self._folder, self._job, 1, *self._options, "--node-rank", str(node_rank))[0]


def disturb(port: int) -> None:
    """Does what a stranger can do who reaches the store: sends junk, and writes to all names that the launchers use."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n" * 100)
    store = connect_store("127.0.0.1", port, timedelta(seconds=30))
    store.queue_push("refusals", "junk")
    names = [name for name in store.list_keys() if name.rpartition("/")[2] in ("rendezvous", "greeting")]
    assert len(names) == 2
    for name in names:
        store.set(name, "of a stranger")
    store.set("rendezvous", '{"closed": true}')
    store.set("failure of rank 1 in attempt 0", "{}")


def finish(process: Process) -> tuple[str, str]:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out, err


def test_two_commands_train_as_one_whatever_a_stranger_does_in_their_store(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    machines = Machines(tmp_path)
    second, first = machines.start(1), machines.start(0)
    wait_for(machines.run, rank=1, step=2)
    disturb(machines.port)
    result, err = commands.finish(first, STEPS)
    assert (result["run"], result["restarts"]) == (str(machines.run.path), 0)
    assert "training on 2 CPU ranks" in err
    assert "refused: a process that is no machine came without the token of this run" in err
    out, other_err = finish(second)
    assert out == "", "rank 0 prints the result"
    refusal = "refused: 'rendezvous' in the store of the ranks was not written with the token of this run"
    assert refusal in err + other_err, "whichever machine has seen it first"
    assert_same(final_state(machines.run), undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("killed", [0, 1])
def test_a_command_that_is_killed_and_started_again_changes_no_bit(
    tmp_path: Path, undisturbed: dict[str, Any], killed: int
) -> None:
    machines = Machines(tmp_path)
    processes = {rank: machines.start(rank) for rank in (0, 1)}
    wait_for(machines.run, rank=killed, step=12)
    processes[killed].send_signal(signal.SIGKILL)
    processes[killed].communicate(timeout=60)
    processes[killed] = machines.start(killed)
    commands.finish(processes[0], STEPS)
    finish(processes[1])
    assert_same(final_state(machines.run), undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize(("stopped", "number"), [(1, signal.SIGTERM), (0, signal.SIGINT)])
def test_a_stop_of_one_command_saves_and_ends_all(
    tmp_path: Path, undisturbed: dict[str, Any], stopped: int, number: signal.Signals
) -> None:
    machines = Machines(tmp_path)
    processes = [machines.start(rank) for rank in (0, 1)]
    wait_for(machines.run, rank=0, step=12)
    processes[stopped].send_signal(number)
    for process in processes:
        _, err = process.communicate(timeout=100)
        assert process.returncode == 1
        assert "the same commands" in err.splitlines()[-1]
        assert "Traceback" not in err
    stopped_at = find_newest_valid(machines.run.checkpoints).manifest
    assert stopped_at is not None
    assert 12 <= stopped_at.step < STEPS
    again = [machines.start(rank) for rank in (0, 1)]
    commands.finish(again[0], STEPS)
    finish(again[1])
    assert_same(final_state(machines.run), undisturbed)


@pytest.mark.soak
def test_an_elastic_run_takes_in_a_machine(tmp_path: Path) -> None:
    gate = tmp_path / "gate"  # the first machine waits there until it has noticed the second one
    data = {"train": {"call": "tests.train.gated:Gated", "gate": str(gate), "free": 31 * 40}}
    machines = Machines(
        tmp_path, "1:2", {**JOB, "data": {**JOB["data"], **data}, "train": {**JOB["train"], "epochs": 6}}
    )
    first = machines.start(0)
    wait_for(machines.run, rank=0, step=20)
    second = machines.start(1)
    first.wait_for_text("a machine joins: the ranks save, and all start again")
    gate.touch()
    result, err = commands.finish(first, 6 * 17)
    assert " on 2 CPU ranks" in err
    finish(second)
    assert result["run"] == str(machines.run.path)


@pytest.mark.soak
def test_an_elastic_run_goes_on_with_fewer_machines_and_takes_one_in_that_comes_back(tmp_path: Path) -> None:
    steps = 60 * 17
    log = {**JOB["log"], "eval_every_steps": 5000}
    job = {**JOB, "train": {**JOB["train"], "epochs": 60}, "log": log}
    machines = Machines(tmp_path, "1:2", job)
    first, second = machines.start(0), machines.start(1)
    wait_for(machines.run, rank=1, step=20)
    second.kill()
    second.wait()
    alone = Moment(rank=0, step=30, attempt=1).wait(machines.run)
    assert alone is not None
    again = machines.start(1)
    assert Moment(rank=1, step=alone.step, attempt=alone.attempt + 1).wait(machines.run) is not None
    _, err = commands.finish(first, steps)
    finish(again)
    starts = [
        line.split(" on ")[1].split(" (")[0] for line in err.splitlines() if " CPU rank" in line and " on " in line
    ]
    assert starts == ["2 CPU ranks", "1 CPU rank", "2 CPU ranks"], err


@pytest.mark.soak
def test_an_error_of_one_machines_rank_ends_all(tmp_path: Path) -> None:
    machines = Machines(tmp_path, job={**TWO_RANKS, "optimizer": {"call": "torch.optim:Adam", "lr": -1.0}})
    processes = [machines.start(rank) for rank in (0, 1)]
    for process in processes:
        out, err = process.communicate(timeout=100)
        assert process.returncode == 2, err
        assert out == ""
        assert "Invalid learning rate: -1.0" in err.splitlines()[-1]
