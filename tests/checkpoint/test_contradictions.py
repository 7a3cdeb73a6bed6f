"""A checkpoint that contradicts itself is not believed though all its checksums are right, and an older one is used. A
model that differs from all checkpoints of a run is the user's change, and stays an error."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.index import INDEX, any_overlap
from meshwright.checkpoint.load import find_newest_valid
from meshwright.checkpoint.manifest import MANIFEST, Manifest, file_checksum, write_manifest
from meshwright.checkpoint.reader import verify
from meshwright.errors import CheckpointError
from tests.train.one_process import make_trainer, session_of, toy_job, train

JOB = toy_job(checkpoint={"every_steps": 5})
OLDER, NEWER = "step-00000005", "step-00000010"
WEIGHT = "model/layers.0.weight"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(JOB, folder)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    return tmp_path / "run"


def edit(folder: Path, of_index: Callable[[Any], None], of_about: Callable[[Any], None] = lambda about: None) -> None:
    """Changes a checkpoint and makes all its checksums right again."""
    manifest = json.loads((folder / MANIFEST).read_text())
    index = json.loads((folder / INDEX).read_text())
    of_index(index)
    of_about(manifest["about"])
    (folder / INDEX).write_text(json.dumps(index))
    files = {name: file_checksum(folder / name) for name in manifest["files"]}
    write_manifest(folder, Manifest.model_construct(step=manifest["step"], files=files, about=manifest["about"]))


def hole(index: Any) -> None:
    pieces = index["tensors"][WEIGHT]["pieces"]
    rows, columns = pieces[0]["sizes"]
    half = {**pieces[0], "sizes": [rows // 2, columns]}
    pieces[:] = [half, half]


def shared_bytes(index: Any) -> None:
    first, second = (index["tensors"][f"optimizer/layers.0.weight/{name}"] for name in ("exp_avg", "exp_avg_sq"))
    first["pieces"] = second["pieces"]


def quantized(index: Any) -> None:
    index["tensors"][WEIGHT]["dtype"] = "qint32"


def no_groups(index: Any) -> None:
    del index["objects"]["optimizer_groups"]


def no_names(index: Any) -> None:
    index["objects"]["optimizer_groups"] = [{"dict": {"lr": 0.1}}]


def rate_that_is_a_text(index: Any) -> None:
    index["objects"]["optimizer_groups"][0]["dict"]["lr"] = "abc"


def rate_that_is_nan(index: Any) -> None:
    index["objects"]["optimizer_groups"][0]["dict"]["lr"] = float("nan")


def option_that_is_nan(index: Any) -> None:
    index["objects"]["optimizer_groups"][0]["dict"]["eps"] = float("nan")


def no_schedule(index: Any) -> None:
    del index["objects"]["schedule"]


def wrong_loss_scale(index: Any) -> None:
    index["objects"]["loss_scale"] = {"dict": {"value": 0, "good": 0, "skipped": 0}}


def parameter_twice(index: Any) -> None:
    index["objects"]["optimizer_groups"] *= 2


def tensor_and_object(index: Any) -> None:
    index["objects"][WEIGHT] = 1


def state_of_unknown_parameter(index: Any) -> None:
    index["tensors"]["optimizer/x/exp_avg"] = index["tensors"].pop("optimizer/layers.0.weight/exp_avg")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (hole, "two pieces have the same element"),
        (shared_bytes, "has the bytes of another tensor"),
        (quantized, "'qint32' is no dtype that can be saved"),
        (no_groups, "it has no optimizer_groups"),
        (no_names, "its optimizer_groups are not lists of parameters"),
        (rate_that_is_a_text, "its optimizer_groups have 'lr' = 'abc', which is no number"),
        (rate_that_is_nan, "its optimizer_groups have 'lr' = nan, which is no number"),
        (option_that_is_nan, "its optimizer_groups have 'eps' = nan, which is no number"),
        (no_schedule, "it has no schedule"),
        (wrong_loss_scale, "its loss_scale is not a factor"),
        (parameter_twice, "its optimizer_groups have a parameter twice"),
        (tensor_and_object, "it has model/layers.0.weight as a tensor and as an object"),
        (state_of_unknown_parameter, "it has optimizer/x/exp_avg, but its optimizer_groups do not have that parameter"),
    ],
)
def test_an_index_that_contradicts_itself_is_not_believed(
    run: Path, change: Callable[[Any], None], message: str
) -> None:
    edit(run / "checkpoints" / NEWER, change)
    newest = find_newest_valid(run / "checkpoints")
    assert newest.path == run / "checkpoints" / OLDER
    assert message in newest.problems[0]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("loss", "0.5", "loss: Input should be a valid number"),
        ("position", [0, 10**12], "batch 1000000000000 of an epoch cannot come next after 10 steps"),
        ("best", ["1", 0.5], "best.0: Input should be a valid integer"),
        ("skipped", True, "skipped: Input should be a valid integer"),
        ("parts", 10**12, "parts: at most"),
        ("evaluated", [5, {"loss": None}], "evaluated.1.loss: Input should be a valid number"),
    ],
)
def test_a_manifest_with_values_of_another_kind_is_not_believed(
    run: Path, field: str, value: Any, message: str
) -> None:
    edit(run / "checkpoints" / NEWER, lambda index: None, lambda about: about.update({field: value}))
    newest = find_newest_valid(run / "checkpoints")
    assert newest.path == run / "checkpoints" / OLDER
    assert message in newest.problems[0]
    assert "\n" not in newest.problems[0]


# ---- checkpoints that are consistent, but do not fit the model


def missing_weight(index: Any) -> None:
    del index["tensors"][WEIGHT]


def transposed_weight(index: Any) -> None:
    tensor = index["tensors"][WEIGHT]
    tensor["shape"].reverse()
    for piece in tensor["pieces"]:
        piece["sizes"].reverse()


def integers(index: Any) -> None:
    index["tensors"][WEIGHT]["dtype"] = "int32"


MISFITS = [
    (missing_weight, "the checkpoint has no layers.0.weight, which the model has"),
    (transposed_weight, "layers.0.weight is (20, 8) in the checkpoint, but (8, 20) in the model"),
    (integers, "layers.0.weight is int32 in the checkpoint, but float32 in the model"),
]


@pytest.mark.parametrize(("change", "message"), MISFITS)
def test_a_run_uses_the_older_checkpoint_if_only_that_one_fits_its_model(
    run: Path, change: Callable[[Any], None], message: str
) -> None:
    edit(run / "checkpoints" / NEWER, change)
    verify(run / "checkpoints" / NEWER)
    trainer = make_trainer(JOB, run)
    trainer.checkpoints.note_start(session_of(trainer).state())
    start = trainer._resume()
    assert f"checkpoint left out: {run / 'checkpoints' / NEWER}: {message}" in start
    assert "resuming after step 5" in start


@pytest.mark.parametrize(("change", "message"), MISFITS)
def test_a_model_that_fits_no_checkpoint_is_an_error(run: Path, change: Callable[[Any], None], message: str) -> None:
    for name in (OLDER, NEWER):
        edit(run / "checkpoints" / name, change)
    trainer = make_trainer(JOB, run)
    before = {name: value.clone() for name, value in session_of(trainer).state_dict().items()}
    with pytest.raises(CheckpointError) as raised:
        train(JOB, run)
    assert str(raised.value).startswith(message)
    with pytest.raises(CheckpointError):
        session_of(trainer).load(run / "checkpoints" / NEWER)
    assert all(torch.equal(before[name], value) for name, value in session_of(trainer).state_dict().items())


@pytest.mark.parametrize(
    ("saved", "model", "loads"),
    [
        ("float32", torch.bfloat16, True),
        ("float32", torch.float64, True),
        ("float16", torch.bfloat16, False),
        ("int32", torch.float32, False),
        ("bool", torch.uint8, False),
        ("complex64", torch.float64, False),
    ],
)
def test_only_numbers_of_the_same_kind_are_converted(
    tmp_path: Path, saved: str, model: torch.dtype, loads: bool
) -> None:
    def session(dtype: torch.dtype) -> Any:
        session = session_of(make_trainer(JOB, tmp_path))
        session.module.register_buffer("extra", torch.ones(3, dtype=dtype))
        return session

    session(getattr(torch, saved)).save(tmp_path / "saved")
    other = session(model)
    if loads:
        other.load(tmp_path / "saved")
        assert other.module.extra.dtype == model
    else:
        with pytest.raises(CheckpointError, match=f"extra is {saved} in the checkpoint, but"):
            other.load(tmp_path / "saved")


def test_regions_that_share_an_element_are_found() -> None:
    grid = [((row, column), (2, 3)) for row in range(0, 10, 2) for column in range(0, 9, 3)]
    assert not any_overlap(grid)
    assert any_overlap([*grid, ((4, 4), (1, 1))])
    assert not any_overlap([((0,), (3,)), ((1,), (0,)), ((3,), (2,))]), "an empty region shares nothing"
    assert not any_overlap([])
