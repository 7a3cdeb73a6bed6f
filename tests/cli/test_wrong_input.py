"""A wrong job, file or argument of `meshwright train` ends with one line and exit code 2, and nothing is written."""

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

import meshwright.train.run
from meshwright.errors import InputError
from meshwright.job import load_job
from meshwright.plan import Plan
from meshwright.train.output.folder import RunFolder, write_job_and_plan
from tests.cli.commands import JOB, RefusalOf, RunCommand, file_names
from tests.forking.forked import start_command

WRONG_SETTINGS: list[tuple[str, list[str], str]] = [
    ("unknown section", ["optimizr={}"], "optimizr is not a field: did you mean 'optimizer'?"),
    ("unknown field", ["train.epoch=3"], "train.epoch is not a field: did you mean 'epochs'?"),
    ("wrong type", ["train.epochs=three"], "train.epochs is 'three': input should be a valid integer"),
    ("tuning time", ["tune=soon"], "tune is 'soon': write true, false, or a number of seconds up to 1,000,000"),
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
    (
        "text for a number",
        ["optimizer.lr=abc"],
        "optimizer: torch.optim:SGD takes a number as lr, by default 0.001, and this is the text 'abc'",
    ),
    ("group option", ["optimizer.groups=[{match: layers.6, lrr: 1}]"], "has no option 'lrr': did you mean 'lr'?"),
    ("group match", ["optimizer.groups=[{match: head, lr: 1}]"], "'head' matches no trainable parameter"),
    ("group without match", ["optimizer.groups=[{lr: 1}]"], "has no 'match'"),
    ("schedule keyword", ["schedule.step_sise=1"], "takes no 'step_sise': did you mean 'step_size'?"),
    (
        "schedule that wants a metric",
        ["schedule={call: torch.optim.lr_scheduler:ReduceLROnPlateau}", "data.eval=null", "checkpoint.best=null"],
        "is stepped with a metric of each evaluation, but data.eval is missing",
    ),
    ("metric of a schedule", ["schedule.metric=acuracy"], "schedule.metric is 'acuracy', but metrics has no metric of"),
    (
        "callback without methods",
        ["callbacks=[{call: pathlib:Path}]"],
        "which has none of the methods begin, step, eval",
    ),
    ("callback keyword", ["callbacks=[{call: meshwright.train.callbacks:EarlyStopping, patince: 2}]"], "'patience'?"),
    ("weights of samples", ["data.weights=none.txt"], "none.txt cannot be read as numbers, one for each sample"),
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
        "train.global_batch is 1, smaller than 2 data-parallel ranks × 1 microbatches = 2: raise it, or reduce",
    ),
    (
        "batch smaller than microbatches",
        ["plan.memory.accumulation=31"],
        "train.global_batch is 30, smaller than 1 data-parallel ranks × 31 microbatches = 31",
    ),
    (
        "too many devices",
        ["plan.axes.replicate=3"],
        "plan.axes: replicate(3) = 3 ranks, but the cluster '2xcpu' has 2 devices (CPU cores): choose axes whose"
        " product is at most 2, or use --cluster 3xcpu",
    ),
    (
        "thousands of ranks",
        ["cluster=5000xcpu", "plan.axes.replicate=5000", "train.global_batch=5000"],
        "the plan (replicate 5000 · fp32) has 5000 processes, but this machine has",
    ),
    ("stages without cuts", ["plan.axes.pipeline=2"], "0 cuts make 1 stages, but 1f1b on 2 ranks runs 2"),
    ("plan field", ["plan.axis.tensor=2"], "plan.axis is not a field: did you mean 'axes'?"),
    ("plan file", ["plan=plans/none.yaml"], "none.yaml: there is no such plan file"),
    ("cluster", ["cluster=64xH9000"], "cluster '64xH9000' is not known"),
    ("huge batch", ["train.global_batch=1000000000000000000"], "is 1000000000000000000: at most 2**31 - 1 samples"),
    ("huge seed", [f"train.seed={10**40}"], "at most 2**63 - 1, which is the largest seed of torch's generators"),
    ("infinite time", ["train.timeout_s=.inf"], "train.timeout_s is inf: at most 1,000,000 s"),
    ("huge cluster", ["cluster=999999x999999xH100"], "has 999,998,000,001 devices: at most 65,536"),
    ("NUL in a path", ['output="a\\0b"'], "output is 'a\\x00b': a path cannot contain the character NUL"),
    ("NUL in the data's folder", ['data.root="a\\0b"'], "data.root is 'a\\x00b': a path cannot contain the character"),
    ("NUL in a file", ['model.call="a\\0.py:Net"'], "call is 'a\\x00.py': a path cannot contain the character NUL"),
    ("long path", ["output=" + "x/" * 2500], "a path has at most 4095 bytes, this has 5000"),
    ("long name", ["output=" + "x" * 300], "a name in a path has at most 255 bytes, one here has 300"),
    ("home of nobody", ["output=~nobody here/x"], "~nobody here is no user of this machine; write ./~nobody here"),
    ("deep field", [".".join("a" * 2000) + "=1"], "the field has 2000 names between dots"),
    ("line break", ["train.epochs=[1\n"], "is not YAML"),
    ("malformed setting", ["train.epochs"], "--set train.epochs: write --set a.b=c"),
    ("setting that is no YAML", ["train.freeze=[a"], "is not YAML"),
]


@pytest.mark.parametrize(("settings", "words"), [s[1:] for s in WRONG_SETTINGS], ids=[s[0] for s in WRONG_SETTINGS])
def test_a_wrong_field_is_one_line_and_writes_nothing(refusal_of: RefusalOf, settings: list[str], words: str) -> None:
    options = [word for setting in settings for word in ("--set", setting)]
    assert words in refusal_of("train", "job.yaml", *options)


def test_wrong_files_are_one_line_and_write_nothing(folder: Path, refusal_of: RefusalOf) -> None:
    assert "none.yaml: there is no such job file" in refusal_of("train", "none.yaml")
    (folder / "broken.yaml").write_text("model: {call: x\ndata: ]")
    assert "broken.yaml, line 2: not YAML" in refusal_of("train", "broken.yaml")
    assert "none.yaml: there is no such plan file" in refusal_of("train", "job.yaml", "--plan", "none.yaml")
    assert "no run folder, it has no job.yaml" in refusal_of("train", "job.yaml", "--resume", "nowhere")
    assert "no run folder, it has no plan.yaml" in refusal_of("train", "job.yaml", "--resume", str(folder))
    (folder / "syntax.py").write_text("def build(:\n")
    assert "syntax.py, line 1:" in refusal_of("train", "job.yaml", "--set", "model.call=syntax.py:build")
    (folder / "file").write_text("in the way")
    assert "output: cannot write in 'file/runs'" in refusal_of("train", "job.yaml", "--set", "output=file/runs")
    assert "output: cannot write in 'file'" in refusal_of("train", "job.yaml", "--set", "output=file")


def test_resuming_a_run_with_another_job_is_refused(folder: Path, refusal_of: RefusalOf) -> None:
    run = RunFolder(folder / "runs" / "job-0001")
    run.logs.mkdir(parents=True)
    write_job_and_plan(run, load_job(folder / "job.yaml"), Plan())
    line = refusal_of("train", "job.yaml", "--resume", "runs/job-0001", "--set", "train.global_batch=20")
    assert "that run trains something else: train.global_batch is 30 there and 20 here" in line


def test_wrong_weights_are_one_line_and_write_nothing(folder: Path, refusal_of: RefusalOf) -> None:
    def refusal_of_weights(name: str, *skip: str) -> str:
        weights = json.dumps({"path": name, "skip": list(skip)})
        return refusal_of("train", "job.yaml", "--set", f"train.weights={weights}")

    (folder / "text.pt").write_text("not weights")
    assert "text.pt cannot be read as weights" in refusal_of_weights("text.pt")
    torch.save([1, 2], folder / "list.pt")
    assert "list.pt holds no mapping of names to tensors" in refusal_of_weights("list.pt")
    save_file({"other.weight": torch.zeros(2)}, folder / "other.safetensors")
    assert "other.safetensors has no layers.0.weight" in refusal_of_weights("other.safetensors")
    assert "holds other.weight, which the model does not have" in refusal_of_weights("other.safetensors", "layers")
    torch.save({"layers.0.weight": torch.zeros(2, 2)}, folder / "small.pt")
    line = refusal_of_weights("small.pt", "layers.0.bias", "layers.[3-6]*")
    assert "layers.0.weight is (2, 2) in" in line
    assert "but (64, 20) in the model" in line


def idx_file(shape: tuple[int, ...], content: bytes) -> bytes:
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + content


def test_a_damaged_data_folder_is_one_line_and_writes_nothing(folder: Path, refusal_of: RefusalOf) -> None:
    digits = {"call": "meshwright.workloads.mnist:digits"}
    job = {**JOB, "model": {"call": "meshwright.workloads.mnist:Net"}, "data": {"train": digits, "root": "digits"}}
    (folder / "mnist.yaml").write_text(yaml.safe_dump(job))
    (folder / "digits").mkdir()
    images = folder / "digits" / "train-images-idx3-ubyte"
    labels = folder / "digits" / "train-labels-idx1-ubyte"

    assert "there is no train-images-idx3-ubyte" in refusal_of("train", "mnist.yaml")
    labels.write_bytes(idx_file((2,), b"\1\2"))
    images_file = idx_file((2, 28, 28), bytes(2 * 28 * 28))
    images.write_bytes(images_file[:-7])
    assert "1561 follow: it is cut short" in refusal_of("train", "mnist.yaml")
    images.write_bytes(b"\x89PNG and so on")
    assert "not an IDX file" in refusal_of("train", "mnist.yaml")
    images.write_bytes(gzip.compress(images_file)[:-5])
    assert "the gzip file is truncated" in refusal_of("train", "mnist.yaml")
    images.write_bytes(idx_file((2, 5, 5), bytes(50)))
    assert "holds 2 × 5 × 5 values, not images of 28 × 28" in refusal_of("train", "mnist.yaml")
    images.write_bytes(idx_file((3, 28, 28), bytes(3 * 28 * 28)))
    assert "has 3 images, but" in refusal_of("train", "mnist.yaml")


def test_an_error_that_only_ranks_detect_leaves_no_files_either(
    folder: Path, refusal_of: RefusalOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(module: str, arguments: list[str], ranks: Any, logs: Path, environment: Any) -> None:
        logs.mkdir(parents=True)
        raise InputError("data.target is 'y', but batches have no such key")

    monkeypatch.setattr(meshwright.train.run, "launch", refuse)
    line = refusal_of("train", "job.yaml", "--set", "output=new/runs", "--set", "plan.axes.replicate=2")
    assert "data.target is 'y'" in line
    (folder / "runs").mkdir()
    (folder / "runs" / "mine.txt").touch()
    refusal_of("train", "job.yaml", "--set", "plan.axes.replicate=2")


def test_the_entry_point_ends_with_one_line_and_exit_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests call the entry point in the process of the test, and do not prepare the start of ranks."""
    model = {"call": "torch.nn:Linear", "in_featurs": 20, "out_features": 2}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**JOB, "model": model}))
    monkeypatch.chdir(tmp_path)
    process = start_command(["train", "job.yaml"])
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) == (2, "")
    assert errors == "meshwright: model: torch.nn:Linear takes no 'in_featurs': did you mean 'in_features'?\n"
    assert file_names(tmp_path) == {"job.yaml"}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train", "Missing argument 'JOB'"),
        ("trian job.yaml", "No such command 'trian'"),
        ("train job.yaml --jsn", "No such option: --jsn"),
        ("train job.yaml --record", "'--record' requires an argument"),
        ("train job.yaml --record 100000000", "Invalid value for '--record'"),
        ("plan job.yaml --top 1000000000000", "Invalid value for '--top'"),
        ("plan job.yaml --top -1", "Invalid value for '--top'"),
        ("prove job.yaml --ranks 1000000000", "Invalid value for '--ranks'"),
        ("prove job.yaml --steps -1", "Invalid value for '--steps'"),
        ("prove --against a", "'--against' requires 2 arguments"),
        ("prove --against a b --set x=1", "--set x=1: with --against, give the JOB whose field it sets"),
        ("export run --to safetensors --limit -3", "Invalid value for '--limit'"),
        ("doctor --output ~nobodyhere/x", "--output is '~nobodyhere/x': ~nobodyhere is no user of this machine"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_writes_nothing(refusal_of: RefusalOf, command: str, words: str) -> None:
    assert words in refusal_of(*command.split())


def test_no_arguments_print_the_help(run_command: RunCommand) -> None:
    result = run_command()
    assert result.exit_code == 2
    assert "Usage" in result.stdout + result.stderr


def test_home_folders_are_expanded_in_every_path(
    folder: Path, refusal_of: RefusalOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = folder / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    (home / "job.yaml").write_text(yaml.safe_dump({**JOB, "output": "~/runs", "data": {**JOB["data"], "root": "~/d"}}))
    job = load_job("~/job.yaml")
    assert (job.output, job.data.root) == (str(home / "runs"), str(home / "d"))
    for option in ("--plan", "--cluster"):
        assert f"{home}/none.yaml: there is no such" in refusal_of("train", "job.yaml", option, "~/none.yaml")
    assert f"{home}/none.yaml: there is no such" in refusal_of("train", "job.yaml", "--set", "plan=~/none.yaml")
    assert f"{home}/x.pt" in refusal_of("train", "job.yaml", "--set", "train.weights=~/x.pt")
    resume = ("--resume", "~/run", "--set", "plan.axes.replicate=1")
    assert f"--resume {home}/run: this is no run folder" in refusal_of("train", "job.yaml", *resume)
    assert f"{home}/run: this is no run folder" in refusal_of("export", "~/run", "--to", "bf16")
    assert f"--against {home}/run: this is no run" in refusal_of("prove", "--against", "~/run", "~/run")


def test_a_message_is_one_line_that_a_terminal_can_show(refusal_of: RefusalOf) -> None:
    line = refusal_of("train", "a\nb\x1b[31m\udcff.yaml")
    assert line == "meshwright: a b\\x1b[31m\\udcff.yaml: there is no such job file\n"
    assert len(refusal_of("train", "job.yaml", "--set", f"x.{'y' * 100_000}=[")) < 2_100


@pytest.mark.parametrize("file", ["/dev/zero", "/dev"])
def test_a_file_without_end_and_a_folder_are_refused(
    refusal_of: RefusalOf, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.files.yaml_file._LONGEST_TEXT", 1000)
    assert file in refusal_of("train", file)
    assert file in refusal_of("train", "job.yaml", "--plan", file)


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "soon", ""])
def test_a_tuning_time_that_is_no_number_of_seconds_is_refused(refusal_of: RefusalOf, seconds: str) -> None:
    refusal = refusal_of("train", "job.yaml", f"--tune={seconds}")
    assert f"--tune {seconds}: write a number of seconds, 0 to measure nothing" in refusal


@pytest.mark.parametrize("command", ["train job.yaml --cluster ", "plan job.yaml --cluster "])
def test_an_empty_cluster_is_refused(refusal_of: RefusalOf, command: str) -> None:
    assert "--cluster is empty: write a value, or leave --cluster out" in refusal_of(*command.split(" "))
