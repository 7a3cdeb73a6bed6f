"""A job file: what its fields mean, that it survives a round trip through YAML, and how mistakes in it are reported."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.job import Job, load_job, parse_job
from meshwright.plan import Plan
from meshwright.user.call import build

SMALLEST: dict[str, Any] = {
    "model": {"call": "torch.nn:Linear", "in_features": 2, "out_features": 2},
    "data": {"train": {"call": "tests.train.toy:points"}},
    "optimizer": {"call": "torch.optim:SGD", "lr": 0.1},
}
EVERYTHING = """
name: everything
model: {call: torch.nn:Linear, in_features: 2, out_features: 2, bias: {call: builtins:bool}}
constraints: {fix: {axes.tensor: 1}, avoid: [pipeline], max_memory: 40GB}
data:
  train: {call: tests.train.toy:points, size: 100}
  eval: {call: tests.train.toy:points, size: 10}
  root: /data
  synthetic: true
  partition: batch
  workers: 2
  timeout_s: 60
  pin_memory: true
  collate: {call: torch.utils.data:default_collate}
  target: label
  drop_last: true
  damaged: skip
  parts: null
  weights: {call: my_data:weights}
  epoch_samples: 1000
  sampler: null
loss: {call: torch.nn:CrossEntropyLoss, label_smoothing: 0.1}
metrics: {accuracy: {call: meshwright.train.metrics:accuracy}, top3: {call: meshwright.train.metrics:top_k, k: 3}}
optimizer: {call: torch.optim:AdamW, lr: 1e-3, betas: [0.9, 0.95], groups: [no_decay, {match: head, lr: 1.5e-4}]}
schedule: {call: torch.optim.lr_scheduler:StepLR, step_size: 2, per: epoch}
callbacks: [{call: "meshwright.train.callbacks:EarlyStopping", patience: 2}]
train: {epochs: 2, steps: 50, global_batch: 16, clip_norm: 1, seed: 3, weights: {path: /w.pt, skip: [head]},
        freeze: [body], deterministic: true, on_nonfinite: skip, timeout_s: 30, restarts: 1, grace_s: 9,
        spare: false, on_spike: rewind, spike: {window: 50, deviations: 6},
        loss_scale: {start: 256.0, interval: 100, hysteresis: 2, lowest: 1.0}}
checkpoint: {every_steps: 7, keep: 2, best: accuracy, better: higher, frozen: false, copy_to: "s3://bucket/team",
             asynchronous: false, on_full: wait}
log: {every_steps: 3, eval_every_steps: 9, tensorboard: false, profile_steps: [2, 4]}
plan: {axes: {replicate: 2}, numerics: {precision: bf16}, compute: {threads: 1, layout: channels_last}}
allow: changes
tune: false
cluster: 2xcpu
output: elsewhere
synthetic: {train.steps: 3}
"""


def write(folder: Path, text: str | dict[str, Any], name: str = "job.yaml") -> Path:
    file = folder / name
    file.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return file


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        parse_job(raw)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(path: str, value: Any) -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load(yaml.safe_dump(SMALLEST))
    *sections, last = path.split(".")
    section = raw
    for name in sections:
        section = section.setdefault(name, {})
    section[last] = value
    return raw


def test_every_section_survives_a_round_trip_through_yaml(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, EVERYTHING))
    again = load_job(write(tmp_path, job.to_yaml(), "again.yaml"))
    assert again == job
    assert set(yaml.safe_load(EVERYTHING)) == set(Job.model_fields), "the test leaves a section out"
    for section, model in (("data", job.data), ("train", job.train), ("checkpoint", job.checkpoint), ("log", job.log)):
        assert set(yaml.safe_load(EVERYTHING)[section]) == set(type(model).model_fields), f"{section} lacks a field"


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists))
@example("one\x85line")
def test_any_argument_survives_a_round_trip_through_yaml(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    job = parse_job(changed("model.anything", value))
    file = write(tmp_path_factory.mktemp("job"), job.to_yaml())
    assert load_job(file).model.arguments["anything"] == value


@pytest.mark.parametrize("word", ["1e3", "1e-3", "1.5E+4", "yes", "null", "2020-01-01", "0x10"])
def test_words_that_look_like_numbers_stay_words(tmp_path: Path, word: str) -> None:
    job = parse_job(changed("model.version", word))
    assert load_job(write(tmp_path, job.to_yaml())).model.arguments["version"] == word


@pytest.mark.parametrize(
    ("text", "number"), [("1e-3", 1e-3), ("1E3", 1e3), ("-2e+1", -20.0), ("3.e2", 300.0), (".5e1", 5.0)]
)
def test_exponents_are_numbers_with_or_without_a_point(tmp_path: Path, text: str, number: float) -> None:
    job = load_job(write(tmp_path, EVERYTHING.replace("1e-3", text)), [f"optimizer.eps={text}"])
    assert job.optimizer.arguments["lr"] == number
    assert job.optimizer.arguments["eps"] == number


def test_a_job_without_a_name_is_named_after_its_file(tmp_path: Path) -> None:
    assert load_job(write(tmp_path, SMALLEST, "digits.yaml")).name == "digits"
    assert load_job(write(tmp_path, {**SMALLEST, "name": "own"}, "digits.yaml")).name == "own"
    assert load_job(write(tmp_path, SMALLEST, ".hidden.yaml")).name == "hidden"


def test_settings_override_any_field_in_order(tmp_path: Path) -> None:
    file = write(tmp_path, SMALLEST)
    job = load_job(
        file,
        ["train.epochs=4", "train.epochs=5", "optimizer.lr=1e-2", "data.eval={call: tests.train.toy:points}", "name=x"],
    )
    assert (job.train.epochs, job.optimizer.arguments["lr"], job.name) == (5, 0.01, "x")
    assert job.data.eval is not None


def test_settings_reach_inside_a_plan_that_is_auto(tmp_path: Path) -> None:
    file = write(tmp_path, {**SMALLEST, "plan": "auto"})
    assert load_job(file).plan == "auto"
    assert load_job(file, ["plan.axes.replicate=2"]).plan == Plan.model_validate({"axes": {"replicate": 2}})
    both = load_job(file, ["plan.axes.replicate=2", "plan.numerics.precision=bf16"]).plan
    assert both != "auto"
    assert both.summary() == "replicate 2 · bf16"


@pytest.mark.parametrize("setting", ["train.epochs", "=3", "train.epochs=[1", "name.first=x"])
def test_a_malformed_setting_is_quoted_in_the_error(tmp_path: Path, setting: str) -> None:
    with pytest.raises(InputError, match=r"^--set ") as caught:
        load_job(write(tmp_path, {**SMALLEST, "name": "n"}), [setting])
    assert setting in str(caught.value)


def test_a_plan_may_lie_in_a_file_beside_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    write(tmp_path, {"axes": {"replicate": 3}}, "plan.yaml")
    job = load_job(write(tmp_path, {**SMALLEST, "plan": "plan.yaml"}))
    assert job.plan == Plan.model_validate({"axes": {"replicate": 3}})
    with pytest.raises(InputError, match=r"elsewhere\.yaml: there is no such plan file"):
        load_job(write(tmp_path, {**SMALLEST, "plan": "elsewhere.yaml"}))


def test_files_beside_the_job_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, other = tmp_path / "beside", tmp_path / "other"
    beside.mkdir()
    other.mkdir()
    (beside / "users_model.py").write_text("def make(inner=None): return inner or 'made beside the job'")
    (beside / "digits").mkdir()
    (beside / "weights.pt").touch()
    raw = changed("data.root", "digits")
    raw["model"] = {"call": "users_model.py:make", "inner": {"call": "users_model.py:make"}}
    raw["train"] = {"epochs": 1, "weights": "weights.pt"}
    file = write(beside, raw)
    monkeypatch.chdir(other)
    job = load_job(file)
    assert build(job.model, role="model") == "made beside the job"
    assert job.data.root == str(beside / "digits")
    assert job.train.weights is not None
    assert job.train.weights.path == str(beside / "weights.pt")
    # The resolved job works from anywhere, also from where it does not lie beside them.
    assert load_job(write(other, job.to_yaml(), file.name)) == job


def test_files_in_the_working_folder_are_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (tmp_path / "weights.pt").touch()
    monkeypatch.chdir(tmp_path)
    job = load_job(write(jobs, changed("train", {"epochs": 1, "weights": "weights.pt"})))
    assert job.train.weights is not None
    assert job.train.weights.path == str(tmp_path / "weights.pt")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("train.epoch", 3, "train.epoch is not a field: did you mean 'epochs'?"),
        ("optimiser", {}, "optimiser is not a field: did you mean 'optimizer'?"),
        ("data.worker", 2, "data.worker is not a field: did you mean 'workers'?"),
        (
            "checkpoint.zzz",
            2,
            "checkpoint.zzz is not a field: known are asynchronous, best, better, copy_to, every_steps, frozen, keep,"
            " on_full",
        ),
        ("train.epochs", "three", "train.epochs is 'three': input should be a valid integer"),
        ("train.epochs", 0, "train.epochs is 0: input should be greater than 0"),
        ("train.global_batch", -1, "train.global_batch is -1"),
        ("data.partition", "sideways", "data.partition is 'sideways'"),
        ("train", 5, "train is 5: write a mapping"),
        ("model", "torch.nn:Linear", "model is 'torch.nn:Linear': "),
        ("model", {"in_features": 3}, "model.call is missing"),
        ("train", {"global_batch": 3}, "train needs 'epochs' or 'steps'"),
        ("checkpoint.best", "acuracy", "checkpoint.best is 'acuracy', but metrics has no metric of this name"),
        ("checkpoint.best", "loss", "checkpoint.best is 'loss', but data.eval is missing"),
        ("metrics", {"loss": {"call": "meshwright.train.metrics:accuracy"}}, "metrics.loss: "),
        ("optimizer.groups", "nodecay", "optimizer.groups is 'nodecay': write no_decay, or a list such as [{match: "),
        ("optimizer.groups", None, "optimizer.groups is null: write no_decay, or a list such as [{match: "),
        ("optimizer.groups", [5], "optimizer.groups is [5]: write no_decay, or a list such as [{match: "),
        ("optimizer.groups", [{5: 1}], "optimizer.groups is [{5: 1}]: write no_decay, or a list such as [{match: "),
        ("optimizer", None, "optimizer is null: write {call: package.module:name, ...}"),
        (
            "train.weights",
            5,
            "train.weights is 5: write the path of a file or a Hugging Face folder, or {path: file_or_folder, skip:"
            " [patterns]}",
        ),
        ("train.freeze", "head", "train.freeze is 'head': write a list"),
        ("train.deterministic", "maybe", "train.deterministic is 'maybe': write true or false"),
        ("plan.pipeline.cuts", "a", "plan.pipeline.cuts is 'a': write a list"),
        (
            "name",
            ".",
            "name is '.': write letters, digits, '_', '.' and '-' only, and begin with a letter, a digit or '_'",
        ),
        ("name", "a/b", "name is 'a/b': write letters, digits, '_', '.' and '-' only"),
    ],
)
def test_an_error_names_the_field_and_its_value(path: str, value: Any, message: str) -> None:
    assert message in refusal(changed(path, value))


def test_the_hint_how_to_write_a_callable_is_given_for_callables_only() -> None:
    assert "write {call: package.module:name, ...}" in refusal(changed("model", "torch.nn:Linear"))
    assert "call" not in refusal(changed("train", 5))


def test_a_missing_section_is_named() -> None:
    assert "model is missing" in refusal({key: value for key, value in SMALLEST.items() if key != "model"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {call: x", r"job\.yaml, line \d+: not YAML: "),
        ("- a list", r"job\.yaml: a job file is a YAML mapping, this one is list"),
        ("", r"job\.yaml: a job file is a YAML mapping, this one is NoneType"),
    ],
)
def test_a_file_that_is_no_job_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_job(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.yaml: there is no such job file"):
        load_job(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="cannot be read as a job file"):
        load_job(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read as a job file"):
        load_job(tmp_path / "binary.yaml")


def test_a_job_name_is_valid_as_a_folder_name(tmp_path: Path) -> None:
    file = tmp_path / "my [job].yaml"
    file.write_text(yaml.safe_dump(SMALLEST))
    assert load_job(file).name == "my--job-"
    with pytest.raises(InputError, match="name is 'a/b'"):
        load_job(file, ["name=a/b"])


def test_synthetic_data_apply_the_fields_of_the_synthetic_section(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "model: {call: torch.nn:Linear, in_features: 4096}\n"
        "data: {train: {call: own:data, size: 224}}\n"
        "optimizer: {call: torch.optim:SGD}\n"
        "train: {steps: 9, global_batch: 256}\n"
        "synthetic: {train.global_batch: 16, data.train.size: 32, model.in_features: 8}\n"
    )
    assert load_job(file).train.global_batch == 256
    small = load_job(file, ["data.synthetic=true", "train.global_batch=12"])
    assert small.train.global_batch == 12  # a setting on the command line wins
    assert small.data.train.arguments == {"size": 32}
    assert small.model.arguments == {"in_features": 8}
    assert small.synthetic == {}  # so that reading the run's own job file does not apply it again


def test_what_plans_may_change_is_rounding_unless_the_job_says_otherwise() -> None:
    assert parse_job(SMALLEST).allow == "rounding"
    assert "allow is 'exact': input should be 'same', 'rounding' or 'changes'" in refusal(changed("allow", "exact"))
    jobs = Path(__file__).parent.parent / "jobs"
    assert load_job(jobs / "mnist.yaml").allow == "rounding"
    assert load_job(jobs / "gpt.yaml").allow == "changes"


def test_the_data_of_a_job_have_the_sequence_length_that_is_set_for_its_model() -> None:
    gpt = Path(__file__).parents[1] / "jobs" / "gpt.yaml"

    def lengths(*more: str) -> list[int]:
        data = load_job(gpt, [*more, "data.synthetic=true"]).data
        return [part.arguments["sequence"] for part in (data.train, data.eval) if part is not None]

    assert lengths() == [64, 64]
    assert lengths("model.sequence=8192") == [8192, 8192]
    assert lengths("model.sequence=8192", "data.eval.sequence=32") == [8192, 32]
