"""`meshwright train` with a LightningModule: the weights that Lightning's own DDP trains, also if a rank is killed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs the package lightning: pip install lightning==2.6.6")

import torch
import yaml
from torch import Tensor
from typer.testing import CliRunner

from meshwright.checkpoint.load import find_newest_valid, load
from meshwright.cli import app
from meshwright.cli.job_file import load_train_job
from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.job import load_plan, parse_job
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.world import World
from meshwright.train.output.folder import RunFolder
from tests.compat.lightning.modules import EPOCHS, largest_difference, plain
from tests.compat.lightning.trainers import MODULES, fit
from tests.ranks import RankPool, ranks
from tests.soaked import all_but
from tests.train.commands import finish, start

PACKAGE = "tests.compat.lightning.modules"
CLASSES = {"regression": "Regression", "gan": "Gan"}


def job(name: str, **fields: Any) -> dict[str, Any]:
    clip = {"clip_norm": 0.3} if name == "regression" else {}
    return {
        "model": {"call": f"{PACKAGE}:{CLASSES[name]}"},
        "data": {"train": {"call": f"{PACKAGE}:Samples"}},
        "train": {"epochs": EPOCHS, **clip},
        "checkpoint": {"every_steps": 4},
        "log": {"every_steps": 1, "tensorboard": False},
        **fields,
    }


def weights_of(folder: RunFolder, name: str) -> dict[str, Tensor]:
    newest = find_newest_valid(folder.checkpoints)
    assert newest.path is not None
    assert newest.manifest is not None
    module: Any = MODULES[name]()
    load(newest.path, newest.manifest, module, None)
    return plain(module.state_dict())


def check(name: str, size: int, axis: str, folder: Path) -> RunFolder:
    """Trains with a rank that is killed once, and compares with Lightning's DDP on one process."""
    callbacks = [{"call": f"{PACKAGE}:CountSteps"}, {"call": f"{PACKAGE}:DieOnce", "file": str(folder / "killed")}]
    process, run = start(folder, job(name, callbacks=callbacks, plan={"axes": {axis: size}}), size)
    _, errors = finish(process, steps=30 if name == "regression" else 60)
    assert "start again" in errors
    with ranks(1) as pool:
        expected = pool.run(fit, name, "ddp", str(folder))[0]
    assert largest_difference(expected["weights"], weights_of(run, name)) < 1e-9
    if name == "regression":
        lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        evaluations = [line["validation_loss"] for line in lines if line["kind"] == "eval"]
        assert evaluations == pytest.approx(expected["validations"][1:], abs=1e-9)  # the first one is a sanity check
    return run


def train_here(rank: int, size: int, name: str, plan: dict[str, Any], folder: str, fields: dict[str, Any]) -> str:
    """Trains the job as one rank. Returns the message of the error with which it ended, or nothing."""
    from meshwright.compat.lightning.rank import train_module

    run = RunFolder(Path(folder))
    filled = {**job(name, **fields), "optimizer": {"call": "meshwright.compat.lightning_job:configured_by_module"}}
    world = World(rank, rank, size, size, 0, torch.device("cpu"), None)
    try:
        train_module(parse_job(filled), load_plan(plan), run, world, Heartbeat.in_memory())
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "axis"), all_but([("gan", "shard")], [("regression", "replicate"), ("gan", "shard")]))
def test_a_run_that_fails_within_an_epoch_continues(name: str, axis: str, two: RankPool, tmp_path: Path) -> None:
    run, plan = tmp_path / "run", {"axes": {axis: 2}}
    run.mkdir()
    (run / "job.yaml").touch()
    failing = {"callbacks": [{"call": f"{PACKAGE}:FailOnce", "file": str(tmp_path / "failed")}]}
    assert two.run(train_here, name, plan, str(run), failing) == ["batch 9", "batch 9"]
    assert two.run(train_here, name, plan, str(run), {}) == ["", ""]
    expected = two.run(fit, name, "ddp", str(tmp_path))[0]
    assert largest_difference(expected["weights"], weights_of(RunFolder(run), name)) < 1e-9
    assert json.loads((run / "result.json").read_text())["epochs"] == EPOCHS


def test_batches_that_ranks_share_unevenly_have_the_weights_of_one_process(two: RankPool, tmp_path: Path) -> None:
    """Batches of 7 samples, the last one of 2."""
    fields = {"data": {"train": {"call": f"{PACKAGE}:Samples", "batch": 7}}, "train": {"epochs": 2}}
    results = []
    with ranks(1) as one:
        for pool in (one, two):
            run = tmp_path / str(pool.world_size)
            run.mkdir()
            (run / "job.yaml").touch()
            pool.run(train_here, "regression", {"axes": {"replicate": pool.world_size}}, str(run), fields)
            results.append(weights_of(RunFolder(run), "regression"))
    assert largest_difference(*results) < 1e-9


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"loss": {"call": "torch.nn.functional:mse_loss"}}, "training_step returns the loss"),
        ({"plan": {"axes": {"tensor": 2}}}, "session(self, plan)"),
        ({"data": {"train": {"call": f"{PACKAGE}:samples"}}}, "LightningDataModule"),
    ],
)
def test_what_a_module_cannot_have_is_refused(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({**job("regression"), "output": str(tmp_path / "runs"), **fields}))
    loaded = load_train_job(file, [])
    plan = loaded.plan if loaded.plan != "auto" else load_plan({"axes": {"replicate": 1}})
    with pytest.raises(InputError, match=re.escape(reason)):
        refuse(loaded, plan, tmp_path)


def refuse(loaded: Any, plan: Any, folder: Path) -> None:
    from meshwright.compat.lightning.rank import data_module
    from meshwright.compat.lightning.run import check

    check(loaded, plan, find_cluster("2xcpu"))
    data_module(loaded)


def test_a_plain_module_still_needs_an_optimizer(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({"model": {"call": "tests.train.toy:Net"}, "data": {"train": {"call": "a:b"}}}))
    with pytest.raises(InputError, match="optimizer"):
        load_train_job(file, [])


@pytest.mark.parametrize("command", ["plan", "prove"])
def test_other_commands_say_that_only_train_runs_modules(command: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job("regression")))
    result = CliRunner().invoke(app, [command, str(file)])
    assert isinstance(result.exception, InputError)
    assert f"for `meshwright {command}`, write a job whose model is the network inside of it" in str(result.exception)


@pytest.mark.soak
@pytest.mark.parametrize("axis", ["replicate", "shard"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", list(CLASSES))
def test_every_plan_trains_the_weights_of_one_process(name: str, size: int, axis: str, tmp_path: Path) -> None:
    check(name, size, axis, tmp_path)
