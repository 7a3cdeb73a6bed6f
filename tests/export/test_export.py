"""`meshwright export`: which checkpoint it exports, what it reports, and what it refuses in one line."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.cli import main
from meshwright.errors import InputError, StorageError
from meshwright.export.export import SUFFIXES, export
from meshwright.export.run import read_run
from meshwright.export.show import describe_export
from tests.export.runs import train_run
from tests.train.one_process import EVALUATED, toy_job


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = toy_job(**EVALUATED, checkpoint={"every_steps": 5, "best": "accuracy"})
    return train_run(job, tmp_path_factory.mktemp("runs") / "toy-0001")


@pytest.fixture(scope="module")
def data_dependent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = toy_job(**EVALUATED, model={"call": "tests.export.runs:DataDependent"})
    return train_run(job, tmp_path_factory.mktemp("runs") / "toy-0002")


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["meshwright", "export", *arguments])
    with pytest.raises(SystemExit) as exited:
        main()
    return int(exited.value.code or 0)


def test_the_last_line_of_output_is_the_documented_json(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, str(run), "--to", "safetensors", "--json") == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result)[:3] == ["file", "bytes", "metrics"]
    assert result["bytes"] == Path(result["file"]).stat().st_size
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = next(line for line in logged if line["kind"] == "eval" and line["step"] == result["step"])
    for name, change in result["metrics"].items():
        assert change["before"] == pytest.approx(evaluated[name], rel=1e-6)
        assert change["after"] == pytest.approx(change["before"], rel=1e-6)
        assert change["change"] == pytest.approx(0, abs=1e-6)
    assert set(result["metrics"]) == {"loss", "accuracy"}


def test_metrics_after_the_export_are_those_of_the_file(run: Path) -> None:
    exported = export(run, "int8")
    loss = exported.metrics["loss"]
    assert loss.before != loss.after
    assert loss.before == pytest.approx(loss.after, rel=0.1)
    table = "\n".join(describe_export(exported))
    assert "before" in table
    assert "points" in table
    assert "-int8.pt2" in table


def test_the_best_checkpoint_is_exported_by_default(run: Path) -> None:
    best = int((run / "checkpoints" / "best").readlink().name.removeprefix("step-"))
    assert read_run(run).step == best
    assert read_run(run, "best").step == best
    assert read_run(run, "last").step == 10
    assert read_run(run, "5").step == 5
    with pytest.raises(InputError, match="--step 7: write best, last or a step that was kept: 5, 10"):
        read_run(run, "7")


def test_without_an_evaluation_set_only_sizes_are_reported(tmp_path: Path) -> None:
    exported = export(train_run(toy_job(), tmp_path / "toy"), "bf16")
    assert exported.metrics == {}
    assert "size" in describe_export(exported)[2]
    assert "the job has no evaluation set" in describe_export(exported)[-1]
    with pytest.raises(InputError, match="has no best checkpoint"):
        read_run(tmp_path / "toy", "best")


def test_the_export_does_not_follow_a_link_out_of_the_run_folder(run: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "run"
    shutil.copytree(run, foreign, symlinks=True, ignore=shutil.ignore_patterns("export"))
    (foreign / "export").symlink_to(tmp_path)
    with pytest.raises(InputError, match=r"run/export is a symbolic link to .* remove the link, or choose a file"):
        export(foreign, "safetensors", limit=0, trust=True)
    assert list(tmp_path.iterdir()) == [foreign]
    assert export(foreign, "safetensors", tmp_path / "a.safetensors", limit=0, trust=True).file.exists()


def test_a_limit_evaluates_fewer_samples(run: Path) -> None:
    few, none = export(run, "safetensors", limit=2), export(run, "safetensors", limit=0)
    assert few.metrics["accuracy"].before in (0.0, 0.5, 1.0)
    assert none.metrics == {}


def test_a_model_that_cannot_be_exported_is_reported_in_one_line(
    data_dependent: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, str(data_dependent), "--to", "program") == 2
    message = capsys.readouterr().err.strip()
    assert len(message.splitlines()) == 1
    assert message.startswith("meshwright: torch.export cannot make a program of this model: ")
    assert not list((data_dependent / "export").glob("*.pt2"))


def test_int8_of_a_model_that_cannot_be_exported_is_a_state_dict(data_dependent: Path) -> None:
    exported = export(data_dependent, "int8")
    assert exported.file.name == "toy-int8.pt"
    assert "so this is a quantized state dict" in exported.notes[0]
    state = torch.load(exported.file, weights_only=True)
    assert state["linear.weight.rows"].dtype == torch.int8
    original = read_run(data_dependent).model.state_dict()
    weight = original["linear.weight"]
    dequantized = state["linear.weight.rows"] * state["linear.weight.scale"]
    torch.testing.assert_close(dequantized, weight, rtol=0, atol=float(weight.abs().max()) / 200)
    torch.testing.assert_close(state["linear.bias"], original["linear.bias"])
    assert exported.metrics["loss"].after == pytest.approx(exported.metrics["loss"].before, rel=0.1)


def test_a_model_that_works_for_one_batch_size_only_is_refused(tmp_path: Path) -> None:
    run = train_run(toy_job(model={"call": "tests.export.runs:FixedBatchSize"}), tmp_path / "toy")
    with pytest.raises(InputError, match=r"torch\.export cannot make a program"):
        export(run, "program")


def test_int16_without_embeddings_reports_that_nothing_changed(run: Path) -> None:
    exported = export(run, "int16", limit=4)
    assert exported.notes == ("the model has no weights that int16 quantizes: no weight changed",)
    assert exported.metrics["loss"].after == pytest.approx(exported.metrics["loss"].before, rel=1e-6)


def test_int8_without_torchao_says_what_to_install(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(InputError, match=r"--to int8 needs torchao .*: pip install 'meshwright\[quantize\]'"):
        export(run, "int8", limit=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "int4"}, "--to int4: did you mean 'int"),
        ({"to": "bf16", "dynamic": True}, "--dynamic quantizes activations, which --to bf16 does not"),
        ({"to": "int8", "output": Path("x.safetensors")}, r"a file of --to int8 ends in \.pt2"),
        ({"to": "bf16", "run": Path("/nowhere")}, "/nowhere: this is no run folder, it has no job.yaml"),
    ],
)
def test_wrong_options_are_refused(run: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        export(**{"run": run, **options})


@pytest.mark.parametrize("to", ["safetensors", "program"])
@pytest.mark.usefixtures("used_up_quota")
def test_a_disk_that_cannot_take_the_file_is_named_and_nothing_is_left(run: Path, tmp_path: Path, to: str) -> None:
    file = tmp_path / f"toy{SUFFIXES[to]}"
    with pytest.raises(StorageError, match=rf"{file}: the quota of user \S+ on the disk mounted at .* is used up"):
        export(run, to, file, limit=0)
    assert list(tmp_path.iterdir()) == []
