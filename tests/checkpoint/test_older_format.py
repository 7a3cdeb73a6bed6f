"""Checkpoints that torch.distributed.checkpoint wrote for Meshwright still load, under other plans too, and nothing in
them is executed. `written_by_dcp.tar.gz` was written by the last version that used that format: a run on two ranks with
its checkpoint of step 4 (`run`), a checkpoint of a divided model on four ranks (`divided`), and the exported weights of
steps 4 and 8 of the run."""

import json
import pickle
import platform
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshwright.checkpoint.manifest import MANIFEST, file_checksum
from meshwright.checkpoint.reader import verify
from meshwright.errors import CheckpointError
from meshwright.job import load_job
from tests.checkpoint.test_plans import ONE, assert_as_expected, load_under
from tests.ranks import RankPool
from tests.train.one_process import equal_states, make_trainer, session_of, train


@pytest.fixture
def older(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("written_by_dcp.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_it_loads_under_other_plans(older: Path, two: RankPool, four: RankPool) -> None:
    verify(older / "divided")
    assert_as_expected(load_under(0, 1, ONE, older / "divided"))
    plans: list[tuple[RankPool, dict[str, int]]] = [
        (two, {"shard": 2}),
        (two, {"pipeline": 2}),
        (four, {"pipeline": 2, "tensor": 2}),
    ]
    for pool, axes in plans:
        for states in pool.run(load_under, axes, older / "divided"):
            assert_as_expected(states)


def resume(rank: int, size: int, run: Path, plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights at the end of the run, which resumes after step 4."""
    settings = [f"plan.axes.{axis}={number}" for axis, number in plan.items()]
    job = load_job(run / "job.yaml", ["log.tensorboard=false", *settings])
    return session_of(train(job, run, rank=rank, size=size)).state_dict()


@pytest.mark.skipif(platform.machine() != "aarch64", reason="other processors draw other dropout masks")
def test_a_run_resumes_from_it_bitwise(older: Path, two: RankPool) -> None:
    """Weights, moments, schedule (with a Counter of milestones), position and random numbers are those of the run."""
    expected = load_file(older / "step-8.safetensors")
    for state in two.run(resume, older / "run", {}):
        assert equal_states(state, expected)


def test_its_weights_load_under_another_plan(older: Path) -> None:
    job = load_job(older / "run" / "job.yaml", ["plan.axes.shard=1"])
    session = session_of(make_trainer(job, older / "other"))
    session.load(older / "run" / "checkpoints" / "step-00000004")
    assert equal_states(session.state_dict(), load_file(older / "step-4.safetensors"))
    assert (session.steps, session.position, session.seed) == (4, (0, 4), 3)
    assert session.schedule is not None
    assert session.schedule.last_epoch == 4


def test_the_resumed_run_saves_without_pickles(older: Path) -> None:
    resume(0, 1, older / "run", {"shard": 1})
    files = sorted(path.name for path in (older / "run" / "checkpoints" / "step-00000008").iterdir())
    assert files == ["index.json", "manifest.json", "rank-00000.bin"]


def test_entries_in_a_file_without_checksum_are_not_read(older: Path) -> None:
    """`later.distcp` is in the folder, but not in the manifest."""
    folder = older / "run" / "checkpoints" / "step-00000004"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn == "model/layers.0.weight":
            shutil.copy(folder / info.relative_path, folder / "later.distcp")
            info.relative_path = "later.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][".metadata"] = file_checksum(folder / ".metadata").model_dump()
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"its manifest\.json does not have later\.distcp"):
        verify(folder)
