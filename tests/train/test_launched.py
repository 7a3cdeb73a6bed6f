"""`meshwright train` in ranks that torchrun started: it trains, an error names the step, and all ranks know what
rank 0 decided."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
import yaml

from meshwright.auto.decision import Decision
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import detect_cpu, find_cluster
from meshwright.errors import InputError, MeshwrightError, StorageError
from meshwright.job import load_plan
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.processes.peer_connection import PeerLostError
from meshwright.processes.world import World
from meshwright.train import launched
from meshwright.train.launched import ChoosePlan
from tests.forking.forked import start
from tests.ranks import RankPool
from tests.train.one_process import TOY, toy_job, world

MODEL = """
import ctypes, os
from tests.train.toy import Net

class Failing(Net):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3 and os.environ["RANK"] == "1":
            raise ValueError("the third call")
        return super().forward(x)

class Aborting(Net):
    def __init__(self, hidden):  # torch's threads do so now and then: the process aborts when C++ takes itself down
        super().__init__(hidden)
        libc = ctypes.CDLL(None)
        getattr(libc, "__cxa_atexit")(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)
"""


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "toy.yaml").write_text(yaml.safe_dump({**TOY, "cluster": "2xcpu", "output": str(folder / "runs")}))
    (folder / "model.py").write_text(MODEL)
    command = ["--standalone", "--nproc-per-node", "2", "--log-dir", str(folder / "elastic")]
    process = start(
        "tests.forking.forked:torchrun", *command, "-m", "meshwright", "train", str(folder / "toy.yaml"), *arguments
    )
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(command, process.poll() or 0, out, err)


@pytest.mark.core
def test_torchruns_ranks_train_together(tmp_path: Path) -> None:
    run = torchrun(tmp_path, "--json", "--set", "model.call=model.py:Aborting")
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert (result["steps"], result["run"]) == (10, str(tmp_path / "runs" / "toy-0001"))
    assert "training on 2 CPU ranks" in run.stderr
    assert run.stderr.count("plan: replicate 2") == 1  # on rank 0
    assert {log.name for log in (tmp_path / "runs" / "toy-0001" / "logs").glob("*.log")} == {"rank-0.log", "rank-1.log"}


@pytest.mark.soak
def test_the_error_of_a_failing_rank_names_step_and_line(tmp_path: Path) -> None:
    run = torchrun(tmp_path, "--set", "model.call=model.py:Failing")
    assert run.returncode != 0
    assert "rank 1 failed at step 2 (forward): ValueError: the third call (model.py, line 11)\n" in run.stderr


def agree_on_folder(rank: int, world_size: int, output: str, error: MeshwrightError | None) -> tuple[str, str, bool]:
    """Returns the class and message of the error that this rank raises, or the run folder, and whether it is locked."""

    def check_job(*_: object) -> None:
        if error:
            raise error

    job = toy_job(output=output)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launched, "check_job", check_job)
        try:
            run = launched._agree_on_run(
                job, Plan(axes=Axes(replicate=2)), detect_cpu(), "never", world(rank, world_size)
            )
        except MeshwrightError as raised:
            return type(raised).__name__, str(raised), False
    if run.locked_run:
        run.locked_run.lock.close()
    return type(run.folder).__name__, str(run.folder.path), run.locked_run is not None


SHARDS = Plan(axes=Axes(shard=2))


def agree_on_plan(rank: int, world_size: int, output: str) -> Plan:
    def choose(cluster: Cluster, resume: str) -> Decision:
        assert (rank, cluster.device_count, resume) == (0, world_size, "auto")
        return Decision(SHARDS)

    run = launched._agree_on_run(toy_job(output=output), choose, detect_cpu(), "auto", world(rank, world_size))
    if run.locked_run:
        run.locked_run.lock.close()
    assert load_plan(run.folder.plan) == run.plan
    return run.plan


def test_all_ranks_get_the_plan_that_rank_0_chooses(two: RankPool, tmp_path: Path) -> None:
    assert two.run(agree_on_plan, str(tmp_path / "runs")) == [SHARDS, SHARDS]


def test_ranks_that_the_cluster_does_not_describe_are_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    def choose(cluster: Cluster, resume: str) -> Decision:
        return Decision(Plan(axes=Axes(shard=cluster.device_count)), line="plan: shards")

    def chosen(given: ChoosePlan, cluster: Cluster, ranks: World) -> Axes:
        return launched._choose(given, cluster, "auto", ranks)[0].axes

    one_machine = World(0, 0, 4, 4, 0, torch.device("cpu"), None)
    two_machines = World(0, 0, 4, 2, 0, torch.device("cpu"), None)
    described, unknown = find_cluster("2x2xA100-80GB"), find_cluster("2xcpu")
    assert chosen(choose, unknown, one_machine) == Axes(shard=4)
    assert chosen(choose, described, two_machines) == Axes(shard=4)
    assert capsys.readouterr().err == "plan: shards\n" * 2
    assert chosen(choose, unknown, two_machines) == Axes(replicate=4)
    assert "the cluster '2xcpu' does not describe them: describe them with --cluster" in capsys.readouterr().err
    assert chosen(lambda *_: Decision(Plan(), line="one rank"), unknown, one_machine) == Axes(replicate=4)


@pytest.mark.soak
def test_all_ranks_use_the_folder_that_rank_0_chose(two: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "runs" / "toy-0001")
    first, second = two.run(agree_on_folder, str(tmp_path / "runs"), None)
    assert (first, second) == (("RunFolder", path, True), ("RunFolder", path, False))


@pytest.mark.parametrize(
    ("error", "on_rank_1"),
    [
        (InputError("model.layers: it is 0"), "InputError"),
        (StorageError("the disk is full"), "StorageError"),
        (PeerLostError("rank 3 is gone"), "CollectiveError"),  # the class of errors.py that it is derived from
    ],
)
def test_an_error_of_rank_0_is_raised_on_every_rank(
    two: RankPool, tmp_path: Path, error: MeshwrightError, on_rank_1: str
) -> None:
    raised = two.run(agree_on_folder, str(tmp_path / "runs"), error)
    assert raised == [(type(error).__name__, str(error), False), (on_rank_1, str(error), False)]
