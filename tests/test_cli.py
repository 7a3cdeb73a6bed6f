"""Bad input gets one clear line and exit 2, and nothing is written; good output is what scripts rely on."""

import gzip
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

import meshwright.train.run
from meshwright.cli import main
from meshwright.cli.commands import _print_result
from meshwright.errors import InputError
from meshwright.job import load_job
from meshwright.plan import Plan
from meshwright.train.output.folder import RunFolder, write_job_and_plan

JOB: dict[str, Any] = {
    "model": {"call": "tests.train.toy:Net"},
    "data": {"train": {"call": "tests.train.toy:points"}, "eval": {"call": "tests.train.toy:points", "size": 50}},
    "loss": {"call": "torch.nn.functional:cross_entropy"},
    "metrics": {"accuracy": {"call": "meshwright.train.metrics:accuracy"}},
    "optimizer": {"call": "torch.optim:SGD", "lr": 0.1},
    "schedule": {"call": "torch.optim.lr_scheduler:StepLR", "step_size": 1},
    "train": {"epochs": 1, "global_batch": 30},
    "cluster": "2xcpu",
}


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a job in it, whose ranks must never be started."""

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(meshwright.train.run, "launch", started)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    return tmp_path


def refused(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *arguments: str,
    command: str = "train",
) -> str:
    """The one line that the command line ends with; it left everything as it was."""
    before = tree(folder)
    monkeypatch.setattr(sys, "argv", ["meshwright", command, *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    told = capsys.readouterr()
    assert end.value.code == 2
    assert told.out == ""
    assert told.err.startswith("meshwright: ")
    assert told.err.count("\n") == 1, told.err
    assert "Traceback" not in told.err
    assert tree(folder) == before
    return told.err


SETTINGS: list[tuple[str, list[str], str]] = [
    ("unknown field", ["train.epoch=3"], "train.epoch is not a field: did you mean 'epochs'?"),
    ("wrong type", ["train.epochs=three"], "train.epochs is 'three': input should be a valid integer"),
    ("no such module", ["model.call=nowhere.models:Net"], "there is no module 'nowhere'"),
    ("no such name", ["model.call=tests.train.toy:Nett"], "tests.train.toy has no 'Nett': did you mean 'Net'?"),
    ("no such file", ["model.call=my_model.py:build"], "my_model.py"),
    ("model keyword", ["model.hiden=3"], "model: tests.train.toy:Net takes no 'hiden': did you mean 'hidden'?"),
    ("no model", ["model.call=tests.train.toy:points"], "makes a TensorDataset, not an nn.Module"),
    ("data keyword", ["data.train.sise=3"], "data.train: tests.train.toy:points takes no 'sise'"),
    ("no data set", ["data.train.call=fractions:Fraction"], "data.train makes a Fraction, which is no data set"),
    ("empty data set", ["data.eval.size=0"], "data.eval is empty"),
    ("collate", ["data.collate={call: torch.utils.data:no_collate}"], "has no 'no_collate'"),
    ("optimizer name", ["optimizer.call=torch.optim:SDG"], "torch.optim has no 'SDG': did you mean 'SGD'?"),
    ("optimizer keyword", ["optimizer.momentun=1"], "takes no 'momentun': did you mean 'momentum'?"),
    ("optimizer value", ["optimizer.lr=-1"], "optimizer: Invalid learning rate: -1"),
    ("group option", ["optimizer.groups=[{match: layers.6, lrr: 1}]"], "has no option 'lrr': did you mean 'lr'?"),
    ("group match", ["optimizer.groups=[{match: head, lr: 1}]"], "'head' matches no trainable parameter"),
    ("group without match", ["optimizer.groups=[{lr: 1}]"], "has no 'match'"),
    ("schedule keyword", ["schedule.step_sise=1"], "takes no 'step_sise': did you mean 'step_size'?"),
    (
        "schedule that wants a value",
        ["schedule={call: torch.optim.lr_scheduler:ReduceLROnPlateau}"],
        "missing a required argument: 'metrics'",
    ),
    ("loss keyword", ["loss.label_smoothin=1"], "takes no 'label_smoothin': did you mean 'label_smoothing'?"),
    ("loss without a number", ["loss.reduction=none"], "the loss has reduction='none'"),
    ("metric keyword", ["metrics.accuracy.k=1"], "metrics.accuracy: meshwright.train.metrics:accuracy takes no 'k'"),
    ("freeze", ["train.freeze=[layer]"], "train.freeze: 'layer' matches no parameter: did you mean 'layers'?"),
    ("everything frozen", ["train.freeze=[layers]"], "nothing is left to train"),
    ("weights", ["train.weights=none.pt"], "none.pt"),
    (
        "best",
        ["checkpoint.best=f1"],
        "checkpoint.best is 'f1', but metrics has no metric of this name: known are accuracy",
    ),
    (
        "batch smaller than ranks",
        ["plan.axes.replicate=2", "train.global_batch=1"],
        "train.global_batch is 1, smaller than 2 ranks × 1 microbatches = 2: raise it, or use fewer ranks",
    ),
    (
        "batch smaller than microbatches",
        ["plan.memory.accumulation=31"],
        "train.global_batch is 30, smaller than 1 ranks × 31 microbatches = 31",
    ),
    (
        "too many devices",
        ["plan.axes.replicate=3"],
        "replicate(3) = 3 ranks, but the cluster '2xcpu' has 2 devices (CPU cores): choose axes whose product is at"
        " most 2, or --cluster 3xcpu",
    ),
    ("stages without cuts", ["plan.axes.pipeline=2"], "0 cuts make 1 stages, but 1f1b on 2 ranks runs 2"),
    ("plan field", ["plan.axis.tensor=2"], "plan.axis is not a field: did you mean 'axes'?"),
    ("plan file", ["plan=plans/none.yaml"], "none.yaml: there is no such plan file"),
    ("cluster", ["cluster=64xH9000"], "cluster '64xH9000' is not known"),
    ("malformed setting", ["train.epochs"], "--set train.epochs: write --set a.b=c"),
    ("setting that is no YAML", ["train.freeze=[a"], "is not YAML"),
]


@pytest.mark.parametrize(("settings", "words"), [s[1:] for s in SETTINGS], ids=[s[0] for s in SETTINGS])
def test_a_wrong_field_is_one_line_and_writes_nothing(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: list[str],
    words: str,
) -> None:
    options = [word for setting in settings for word in ("--set", setting)]
    assert words in refused(folder, monkeypatch, capsys, "job.yaml", *options)


def test_wrong_files_are_one_line_and_write_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def line(*arguments: str) -> str:
        return refused(folder, monkeypatch, capsys, *arguments)

    assert "none.yaml: there is no such job file" in line("none.yaml")
    (folder / "broken.yaml").write_text("model: {call: x\ndata: ]")
    assert "broken.yaml, line 2: not YAML" in line("broken.yaml")
    assert "none.yaml: there is no such plan file" in line("job.yaml", "--plan", "none.yaml")
    assert "no run folder, it has no job.yaml" in line("job.yaml", "--resume", "nowhere")
    assert "no run folder, it has no plan.yaml" in line("job.yaml", "--resume", str(folder))
    (folder / "syntax.py").write_text("def build(:\n")
    assert "syntax.py, line 1:" in line("job.yaml", "--set", "model.call=syntax.py:build")
    (folder / "file").write_text("in the way")
    assert "output: cannot write in 'file/runs'" in line("job.yaml", "--set", "output=file/runs")
    assert "output: cannot write in 'file'" in line("job.yaml", "--set", "output=file")


def test_going_on_with_another_training_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(folder / "runs" / "job-0001")
    run.logs.mkdir(parents=True)
    write_job_and_plan(run, load_job(folder / "job.yaml"), Plan())
    told = refused(
        folder, monkeypatch, capsys, "job.yaml", "--resume", "runs/job-0001", "--set", "train.global_batch=20"
    )
    assert "that run trains something else: train.global_batch is 30 there and 20 here" in told


def test_wrong_weights_are_one_line_and_write_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def line(name: str, *skip: str) -> str:
        weights = json.dumps({"path": name, "skip": list(skip)})
        return refused(folder, monkeypatch, capsys, "job.yaml", "--set", f"train.weights={weights}")

    (folder / "text.pt").write_text("not weights")
    assert "text.pt cannot be read as weights" in line("text.pt")
    torch.save([1, 2], folder / "list.pt")
    assert "list.pt holds no mapping of names to tensors" in line("list.pt")
    save_file({"other.weight": torch.zeros(2)}, folder / "other.safetensors")
    assert "other.safetensors has no layers.0.weight" in line("other.safetensors")
    assert "holds other.weight, which the model does not have" in line("other.safetensors", "layers")
    torch.save({"layers.0.weight": torch.zeros(2, 2)}, folder / "small.pt")
    told = line("small.pt", "layers.0.bias", "layers.[3-6]*")
    assert "layers.0.weight is (2, 2) in" in told
    assert "but (64, 20) in the model" in told


def idx(shape: tuple[int, ...], content: bytes) -> bytes:
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + content


def test_a_damaged_data_folder_is_one_line_and_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digits = {"call": "meshwright.workloads.mnist:digits"}
    job = {**JOB, "model": {"call": "meshwright.workloads.mnist:Net"}, "data": {"train": digits, "root": "digits"}}
    (folder / "mnist.yaml").write_text(yaml.safe_dump(job))
    (folder / "digits").mkdir()
    images = folder / "digits" / "train-images-idx3-ubyte"
    labels = folder / "digits" / "train-labels-idx1-ubyte"

    def line() -> str:
        return refused(folder, monkeypatch, capsys, "mnist.yaml")

    assert "there is no train-images-idx3-ubyte" in line()
    labels.write_bytes(idx((2,), b"\1\2"))
    whole = idx((2, 28, 28), bytes(2 * 28 * 28))
    images.write_bytes(whole[:-7])
    assert "1561 follow: it is cut short" in line()
    images.write_bytes(b"\x89PNG and so on")
    assert "not an IDX file" in line()
    images.write_bytes(gzip.compress(whole)[:-5])
    assert "the gzip file is truncated" in line()
    images.write_bytes(idx((2, 5, 5), bytes(50)))
    assert "holds 2 × 5 × 5 values, not images of 28 × 28" in line()
    images.write_bytes(idx((3, 28, 28), bytes(3 * 28 * 28)))
    assert "has 3 images, but" in line()


def test_what_only_a_rank_finds_wrong_leaves_nothing_behind_either(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(module: str, arguments: list[str], ranks: Any, logs: Path, environment: Any) -> None:
        logs.mkdir(parents=True)
        raise InputError("data.target is 'y', but batches have no such key")

    monkeypatch.setattr(meshwright.train.run, "launch", refuse)
    told = refused(
        folder, monkeypatch, capsys, "job.yaml", "--set", "output=new/runs", "--set", "plan.axes.replicate=2"
    )
    assert "data.target is 'y'" in told
    (folder / "runs").mkdir()
    (folder / "runs" / "mine.txt").touch()
    refused(folder, monkeypatch, capsys, "job.yaml", "--set", "plan.axes.replicate=2")


def test_a_real_command_ends_with_one_line_and_exit_2(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**JOB, "optimizr": {}}))
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "train", "job.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "meshwright: job.yaml: optimizr is not a field: did you mean 'optimizer'?\n"
    assert tree(tmp_path) == {"job.yaml"}


@pytest.mark.parametrize("arguments", [["train"], ["trian", "job.yaml"], ["train", "job.yaml", "--jsn"]])
def test_a_wrong_command_line_is_exit_2(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["meshwright", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


RESULT: dict[str, Any] = {
    "run": "/" + "long/" * 40 + "[/red]:smile:",
    "steps": 12,
    "loss": 0.5,
    "metrics": {"accuracy": 0.9871, "loss": 0.04},
    "samples_per_s": 1234.5,
    "restarts": 1,
    "predicted_step_s": None,
    "measured_step_s": 0.1,
    "peak_memory_bytes": 5,
}


def test_json_is_the_last_line_of_stdout(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meshwright.train.run, "train", lambda *_: RESULT)
    monkeypatch.setattr(sys, "argv", ["meshwright", "train", "job.yaml", "--json"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == RESULT


def test_people_are_told_accuracy_speed_and_the_whole_run_path(capsys: pytest.CaptureFixture[str]) -> None:
    _print_result(RESULT, as_json=False)
    told = capsys.readouterr().out
    assert "98.71%" in told
    assert "1,234" in told
    assert RESULT["run"] in told


def planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["meshwright", "plan", *arguments, "--json"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    answer: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return answer


def test_plan_answers_with_what_scripts_rely_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = planned(monkeypatch, capsys, "job.yaml", "--cluster", "2xA100-80GB", "--top", "2")
    assert set(answer) == {"best", "ranked", "explanation", "rejected", "candidates", "seconds"}
    assert answer["best"] == answer["ranked"][0]
    assert len(answer["ranked"]) == 2
    for entry in answer["ranked"]:
        assert set(entry) == {"plan", "summary", "step_s", "memory_bytes", "breakdown", "based_on"}
        assert sum(entry["breakdown"].values()) == pytest.approx(entry["step_s"])
        assert Plan.model_validate(entry["plan"]).summary() == entry["summary"]
    assert all(set(entry) == {"plan", "reason"} for entry in answer["rejected"])
    assert tree(folder) == {"job.yaml"}


def test_people_get_a_table_and_a_plan_that_can_be_trained_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["meshwright", "plan", "job.yaml", "--cluster", "2xA100-80GB"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    told = capsys.readouterr().out
    _, _, text = told.partition("# the best plan")
    plan = Plan.model_validate(yaml.safe_load("#" + text))
    assert plan.summary() in told


def test_a_given_plan_alone_is_predicted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.yaml").write_text("axes: {replicate: 2}")
    answer = planned(monkeypatch, capsys, "job.yaml", "--cluster", "2xA100-80GB", "--plan", "mine.yaml")
    assert [entry["summary"] for entry in answer["ranked"]] == ["replicate 2 · fp32"]
    assert answer["candidates"] == 1
    told = refused(
        folder, monkeypatch, capsys, "job.yaml", "--cluster", "8xA100-80GB", "--plan", "mine.yaml", command="plan"
    )
    assert "the plan (replicate 2 · fp32) is for 2 ranks, but the cluster '8xA100-80GB' has 8 devices" in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "8xA100-80GB", "--set", "train.global_batch=257"], "train.global_batch is 257, which no axis"),
        (["--cluster", "2xA100-80GB", "--html", "page.html"], "--html page.html: pages are not written yet"),
        (["--cluster", "64xH9000"], "cluster '64xH9000' is not known"),
        (["--cluster", "2xA100-80GB", "--set", "model.hidden=200000"], "fits no plan on '2xA100-80GB'"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    assert words in refused(folder, monkeypatch, capsys, "job.yaml", *arguments, command="plan")


def test_token_files_are_made_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["meshwright", "data", *words])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return f"{end.value.code} {captured.out}{captured.err}"

    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("all the same words\n" * 5000)
    texts, out = str(tmp_path / "texts"), str(tmp_path / "tokens")
    assert "train.bin: " in told("tokens", texts, out)
    assert told("verify", out).startswith("0 ")
    with (tmp_path / "tokens" / "train.bin").open("r+b") as file:
        file.write(b"x")
    assert "2 meshwright: " in (wrong := told("verify", out))
    assert "train.bin: its checksum is" in wrong
    assert "--damaged maybe: write fatal or skip" in told("tokens", texts, out, "--damaged", "maybe")
    assert "there are no token files" in told("verify", texts)


def test_planning_without_the_data_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    job = Path(__file__).parents[1] / "jobs" / "linear.yaml"
    words = ["plan", str(job), "--cluster", "2xA100-80GB", "--json", "--set", "data.train.count=100"]
    for partition, plan in (("batch", None), ("dimension", {"layers.0": {"kind": "row", "axis": "tensor"}})):
        monkeypatch.setattr(sys, "argv", ["meshwright", *words, "--set", f"data.partition={partition}"])
        with pytest.raises(SystemExit) as end:
            main()
        told = capsys.readouterr()
        assert end.value.code == 0
        assert "data.root is not set: the shapes of a batch are taken from generated data" in told.err
        best = json.loads(told.out.splitlines()[-1])["best"]["plan"]
        if plan is not None:  # which says how the model is to be divided
            assert best["modules"]["splits"] == plan
            assert best["axes"]["tensor"] == 2
