"""A killed rank costs one restart, and the result stays bitwise the same. Each run is a real `meshwright train`."""

import json
import os
import random
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.load import find_newest_valid, load
from meshwright.checkpoint.manifest import checkpoints_in
from meshwright.job import parse_job
from meshwright.train.output.folder import RunFolder
from tests.forking.forked import Process
from tests.ranks import run_ranks
from tests.train import commands, one_process
from tests.train.toy import Net
from validation.bench.faults.inject import corrupt, hang, kill, slow
from validation.bench.faults.leftovers import descendants, find_leftovers
from validation.bench.faults.moments import wait_for

pytestmark = pytest.mark.usefixtures("nothing_left")

STEPS = 51  # three epochs of 17 batches, the last of them short
JOB: dict[str, Any] = {
    "model": {"call": "tests.train.toy:PacedNet"},
    "data": {"train": {"call": "tests.train.toy:points"}, "eval": {"call": "tests.train.toy:points", "size": 301}},
    "loss": {"call": "torch.nn.functional:cross_entropy"},
    "metrics": {"accuracy": {"call": "meshwright.train.metrics:accuracy"}},
    "optimizer": {"call": "torch.optim:Adam", "lr": 0.01},
    "schedule": {"call": "torch.optim.lr_scheduler:MultiStepLR", "milestones": [1, 2], "gamma": 0.5},
    "train": {"epochs": 3, "global_batch": 31, "seed": 3},
    "checkpoint": {"every_steps": 5, "keep": 2, "best": "accuracy"},
    "log": {"every_steps": 5, "eval_every_steps": 10, "tensorboard": False},
}


def job_on(ranks: int) -> dict[str, Any]:
    return {**JOB, "plan": {"axes": {"replicate": ranks}, "gradients": {"bucket_bytes": 8000}}}


def start(folder: Path, ranks: int, *options: str) -> tuple[Process, RunFolder]:
    return commands.start(folder, job_on(ranks), ranks, *options)


def finish(process: Process) -> dict[str, Any]:
    return commands.finish(process, STEPS)[0]


def final_state(folder: RunFolder) -> dict[str, Any]:
    """Weights, buffers and optimizer state of the last checkpoint, and the curve of losses."""
    newest = find_newest_valid(folder.checkpoints)
    assert newest.path is not None
    assert newest.manifest is not None
    assert newest.manifest.step == STEPS
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    load(newest.path, newest.manifest, model, optimizer)
    entries = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    curve = [(e["kind"], e["step"], e["loss"]) for e in entries]
    state = optimizer.state_dict()["state"]
    moments = {f"{number}.{key}": value for number, entry in state.items() for key, value in entry.items()}
    return {"tensors": {**model.state_dict(), **moments}, "curve": curve}


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["tensors"].keys() == expected["tensors"].keys()
    assert [
        name for name, value in expected["tensors"].items() if not torch.equal(actual["tensors"][name], value)
    ] == []
    assert actual["curve"] == expected["curve"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of a run that nobody disturbs, by number of ranks."""

    @cache
    def run(ranks: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("undisturbed")
        run_ranks(train_on_rank, ranks, job_on(ranks), folder)
        return final_state(RunFolder(folder))

    return run


def train_on_rank(rank: int, size: int, job: dict[str, Any], folder: Path) -> None:
    one_process.train(parse_job({"name": "toy", **job}), folder, None, rank, size)


def a_random_moment(seed: int, ranks: int) -> tuple[int, int, str]:
    chance = random.Random(seed)
    doing = chance.choice(["data", "forward", "backward", "optimizer"])
    return chance.randrange(ranks), chance.randrange(1, STEPS - 5), doing


MOMENTS = [
    pytest.param(2, 1, 14, "save", id="2 ranks, inside a save"),
    pytest.param(3, 1, 14, "save", id="3 ranks, inside a save", marks=pytest.mark.soak),
    pytest.param(3, 2, 10, "evaluation", id="3 ranks, inside an evaluation", marks=pytest.mark.soak),
    pytest.param(4, 0, 23, "backward", id="4 ranks", marks=pytest.mark.soak),
    *(
        pytest.param(
            ranks, *a_random_moment(seed, ranks), id=f"{ranks} ranks, random moment {seed}", marks=pytest.mark.soak
        )
        for ranks in (3, 4)
        for seed in range(3)
    ),
]


@pytest.mark.core
@pytest.mark.parametrize(("ranks", "rank", "step", "doing"), MOMENTS)
def test_a_killed_rank_costs_one_restart_and_changes_no_bit(
    tmp_path: Path, undisturbed: Any, ranks: int, rank: int, step: int, doing: str
) -> None:
    expected = undisturbed(ranks)
    process, folder = start(tmp_path, ranks)
    kill(rank).at(step).during(doing).inject(folder)
    assert finish(process)["restarts"] == 1
    assert_same(final_state(folder), expected)


@pytest.mark.parametrize(
    ("ranks", "step"),
    [(2, 12), pytest.param(3, 12, marks=pytest.mark.soak), pytest.param(4, 31, marks=pytest.mark.soak)],
)
def test_after_a_stop_the_same_command_resumes_bitwise(tmp_path: Path, undisturbed: Any, ranks: int, step: int) -> None:
    expected = undisturbed(ranks)
    process, folder = start(tmp_path, ranks)
    wait_for(folder, rank=0, step=step)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the same command resumes it" in err.splitlines()[-1]
    assert "Traceback" not in err
    stopped_at = find_newest_valid(folder.checkpoints).manifest
    assert stopped_at is not None
    assert step <= stopped_at.step < STEPS
    again, same = start(tmp_path, ranks)
    result = finish(again)
    assert result["run"] == str(same.path)
    assert os.listdir(tmp_path / "runs") == ["toy-0001"]
    assert_same(final_state(folder), expected)


def test_a_killed_launcher_leaves_nothing_and_the_same_command_resumes_bitwise(
    tmp_path: Path, undisturbed: Any
) -> None:
    expected = undisturbed(2)
    process, folder = start(tmp_path, 2)
    wait_for(folder, rank=1, step=12)
    started = descendants(process.pid)
    process.kill()
    process.wait()
    assert len(started) >= 3, "the spare process and two ranks"
    assert find_leftovers(started, Path(os.environ["TMPDIR"])) == []
    again, same = start(tmp_path, 2)
    assert finish(again)["run"] == str(same.path)
    assert os.listdir(tmp_path / "runs") == ["toy-0001"]
    assert_same(final_state(folder), expected)


@pytest.mark.soak
def test_a_corrupt_checkpoint_is_named_and_an_older_one_is_used(tmp_path: Path, undisturbed: Any) -> None:
    expected = undisturbed(2)
    process, folder = start(tmp_path, 2)
    wait_for(folder, rank=0, step=17)
    process.send_signal(signal.SIGSTOP)  # the launcher notices the kill when all is prepared
    killed = kill(rank=1).at(step=17).inject(folder)
    newest = max(checkpoints_in(folder.checkpoints).items())
    corrupt(newest[1])
    process.send_signal(signal.SIGCONT)
    result, err = commands.finish(process, STEPS)
    assert result["restarts"] == 1
    assert f"rank 1 was killed by SIGKILL at step {killed.seen.step}" in err
    assert f"checkpoint left out: {newest[1]}: " in err
    assert_same(final_state(folder), expected)


@pytest.mark.soak
def test_a_rank_that_hangs_is_started_again_and_a_slow_one_is_waited_for(tmp_path: Path, undisturbed: Any) -> None:
    expected = undisturbed(2)
    process, folder = start(tmp_path, 2, "--set", "train.timeout_s=5")
    with slow(rank=0, factor=2).at(step=3).inject(folder):
        hang(rank=1).at(step=9).during("forward").inject(folder)
        result, err = commands.finish(process, STEPS)
    assert result["restarts"] == 1
    assert "no answer within 5 s" in err
    assert_same(final_state(folder), expected)
