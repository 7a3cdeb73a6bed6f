"""Adaptive shares in a real run of two ranks, one of which is slowed down from outside: samples move away from it. If
such a run is killed and resumed, it repeats its steps with the same shares, bit for bit, and goes on adapting. So
does a run with shards in proportion."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.train.output.folder import RunFolder
from meshwright.train.output.times.share_changes import read_decisions
from tests.forking.forked import Process, start_command
from validation.bench.faults.inject import kill, slow

pytestmark = pytest.mark.soak

STEPS, KILLED_AT, SAVED_AT = 90, 48, 30
SETTINGS = {
    "data.synthetic": "true",
    "data.eval": "null",
    "train.steps": STEPS,
    "train.global_batch": 32,
    "train.restarts": 0,
    "checkpoint.every_steps": 15,
    "checkpoint.best": "null",
    "log.every_steps": 1,
    "log.tensorboard": "false",
    "plan.axes.replicate": 2,
    "plan.shares": "adaptive",
    "cluster": "2xcpu",
}


def begin(folder: Path, **settings: Any) -> Process:
    words = {**SETTINGS, "output": folder, **settings}
    return start_command(["train", "mnist", "--json", *(f"--set={name}={value}" for name, value in words.items())])


def logged(run: RunFolder) -> dict[int, dict[str, Any]]:
    """What was logged of each step, without its time."""
    entries = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    compared = ("loss", "share_0", "share_1")
    return {entry["step"]: {name: entry[name] for name in compared} for entry in entries if entry["kind"] == "train"}


@pytest.mark.usefixtures("nothing_left")
def test_a_killed_run_repeats_its_shares_bit_for_bit(tmp_path: Path) -> None:
    check_killed_run(tmp_path, workers=0)


def test_shares_begin_after_the_batches_that_workers_have_loaded(tmp_path: Path) -> None:
    """Workers of a rank that was killed leave empty temporary folders of Python's multiprocessing."""
    check_killed_run(tmp_path, workers=2)


def check_killed_run(tmp_path: Path, workers: int) -> None:
    run = RunFolder(tmp_path / "mnist-0001")
    process = begin(tmp_path, **{"data.workers": workers})
    with slow(rank=1, factor=2.5).at(step=1).inject(run):
        kill(rank=0).at(step=KILLED_AT).inject(run)
        _, errors = process.communicate(timeout=200)
    assert process.returncode != 0
    before, decided = logged(run), read_decisions(run.shares)
    changes = [decision for decision in decided if decision.first is not None]
    assert changes, errors
    assert changes[-1].samples[0] > changes[-1].samples[1]
    first, second = changes[0].samples
    assert f"shares are {first}, {second} from step {(changes[0].first or 0) + 1} on" in errors

    process = begin(tmp_path, **{"data.workers": workers})
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    after = logged(run)
    repeated = [step for step in before if step > SAVED_AT]
    assert len(repeated) >= 10
    assert {step: after[step] for step in before} == before
    result = json.loads(out.splitlines()[-1])
    again = read_decisions(run.shares)
    assert again[: len(decided)] == decided
    assert result["share_changes"] == sum(decision.first is not None for decision in again)
    assert result["shares"] == list([d for d in again if d.first is not None][-1].samples)
    assert max(decision.step for decision in again) == STEPS, "it goes on adapting"


@pytest.mark.usefixtures("nothing_left")
def test_a_killed_run_with_shards_in_proportion_repeats_its_steps_bit_for_bit(tmp_path: Path) -> None:
    """And a run that was killed with them goes on with even shards."""
    settings = {"plan.axes.replicate": 1, "plan.axes.shard": 2, "plan.shares": "{shards: [3, 1]}", "train.steps": 30}
    losses = {}
    for name in ("whole", "killed", "even"):
        run = RunFolder(tmp_path / name / "mnist-0001")
        process = begin(tmp_path / name, **settings)
        if name != "whole":
            kill(rank=1).at(step=20).inject(run)
            process.communicate(timeout=200)
            assert process.returncode != 0
            process = begin(tmp_path / name, **{**settings, **({"plan.shares": "{}"} if name == "even" else {})})
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
        entries = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        losses[name] = {entry["step"]: entry["loss"] for entry in entries if entry["kind"] == "train"}
    assert list(losses["whole"]) == list(range(1, 31))
    assert losses["killed"] == losses["whole"]
    assert losses["even"] == losses["whole"], "with two ranks, even shards train the same to the last bit"
