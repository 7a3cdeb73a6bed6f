"""Building the parts of a run from its job: data sets, pretrained weights, frozen parameters, and the schedule."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.train.build import build_data, build_initialized_model, build_loading, build_metrics, load_weights
from meshwright.train.job_parts import JobParts
from meshwright.train.job_session import build_session
from meshwright.user.job_sections import Weights
from tests.train.one_process import equal_states, toy_job, world


class DataSetWithOptions:
    """A data set that keeps the arguments it was built with."""

    def __init__(self, split: str, root: str = "default", synthetic: bool = False, seed: int = 0) -> None:
        self.arguments = (split, root, synthetic, seed)

    def __getitem__(self, index: int) -> Any: ...


class DataSetWithKeywords:
    """A data set that accepts any keyword argument, and names none of them."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments

    def __getitem__(self, index: int) -> Any: ...


class Normed(nn.Module):
    """A body with BatchNorm statistics, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.body(x)))
        return out


def normed(**sections: Any) -> Job:
    return toy_job(model={"call": "tests.train.test_build:Normed"}, **sections)


def test_data_sets_receive_the_arguments_that_they_name() -> None:
    path = "tests.train.test_build:DataSetWithOptions"
    data = {"train": {"call": path, "split": "train"}, "eval": {"call": path, "split": "test", "seed": 9}}
    train, evaluation = build_data(toy_job(data={**data, "root": "/data", "synthetic": True}))
    assert train.arguments == ("train", "/data", True, 3)
    assert evaluation.arguments == ("test", "/data", True, 9)
    train, _ = build_data(toy_job(data=data))
    assert train.arguments == ("train", "default", False, 3), "without data.root the data set uses its default"


def test_data_sets_receive_no_argument_that_they_do_not_name() -> None:
    data = {"train": {"call": "tests.train.test_build:DataSetWithKeywords", "mine": 1}, "root": "/data"}
    assert build_data(toy_job(data=data))[0].arguments == {"mine": 1}


def test_memory_is_pinned_where_there_are_gpus() -> None:
    assert build_loading(toy_job(), torch.device("cuda")).pin_memory
    assert not build_loading(toy_job(data={"pin_memory": False}), torch.device("cuda")).pin_memory
    assert not build_loading(toy_job(data={"pin_memory": True}), torch.device("cpu")).pin_memory


def test_metrics_are_made_with_their_arguments() -> None:
    metrics = build_metrics(toy_job(metrics={"top": {"call": "meshwright.train.metrics:top_k", "k": 1}}))
    assert [int(part) for part in metrics["top"](torch.eye(3), torch.tensor([0, 0, 2]))] == [2, 3]


def test_initial_weights_follow_the_seed() -> None:
    def weights(seed: int) -> dict[str, Tensor]:
        return build_initialized_model(toy_job(train={"seed": seed})).state_dict()

    assert equal_states(weights(3), weights(3))
    assert not equal_states(weights(3), weights(4))


@pytest.mark.parametrize("kind", ["safetensors", "pt", "wrapped", "ours"])
def test_weights_are_loaded_by_name(tmp_path: Path, kind: str) -> None:
    state = build_initialized_model(normed(train={"seed": 9})).state_dict()
    path = tmp_path / ("weights.safetensors" if kind == "safetensors" else "weights.pt")
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save({"wrapped": {"state_dict": state, "epoch": 3}, "ours": {"model": state}}.get(kind, state), path)
    assert equal_states(build_initialized_model(normed(train={"weights": str(path)})).state_dict(), state)


def nested_tuples(levels: int) -> Any:
    return (nested_tuples(levels - 1),) if levels else ()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({0: torch.zeros(2)}, "holds no mapping of names to tensors"),
        ({"w": 3}, "holds no mapping of names to tensors"),
        (torch.zeros(2), "holds no mapping of names to tensors"),
        ({"w": torch.zeros(2, 3).to_sparse()}, "cannot be read as weights: it holds a sparse tensor"),
        ({"w": torch.zeros(2, device="meta")}, "cannot be read as weights: it holds a meta tensor"),
        ({nested_tuples(60): 1}, "its tuples are nested too deeply"),
        ({"w": nn.Linear(2, 2)}, "it names torch.nn.modules.linear.Linear, which is not read from files"),
    ],
    ids=["numbers", "number", "tensor", "sparse", "meta", "tuples", "module"],
)
def test_a_file_that_holds_no_weights_is_refused_in_one_line(tmp_path: Path, content: Any, reason: str) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(InputError) as refusal:
        load_weights(nn.Linear(2, 2), Weights(path=str(tmp_path / "weights.pt")))
    assert str(refusal.value).startswith(f"train.weights: {tmp_path / 'weights.pt'} ")
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_skipped_weights_keep_their_initial_values(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    state = build_initialized_model(normed(train={"seed": 9})).state_dict()
    torch.save({**state, "head.weight": torch.zeros(1000, 6), "head.bias": torch.zeros(1000)}, path)
    initial = build_initialized_model(normed()).state_dict()
    loaded = build_initialized_model(normed(train={"weights": {"path": str(path), "skip": ["head"]}})).state_dict()
    for name, value in loaded.items():
        assert torch.equal(value, initial[name] if name.startswith("head") else state[name]), name


@pytest.mark.parametrize(
    ("change", "skip", "message"),
    [
        ({"head.bias": None}, [], "has no head.bias: did you mean 'head.weight'?; name what is to keep"),
        ({"head.bias": torch.zeros(7)}, [], "head.bias is (7,) in"),
        ({"tail.bias": torch.zeros(7)}, [], "holds tail.bias, which the model does not have: did you mean"),
        ({"head.bias": torch.zeros(7)}, ["body"], "head.bias is (7,) in"),
    ],
)
def test_weights_of_another_model_are_refused(
    tmp_path: Path, change: dict[str, Any], skip: list[str], message: str
) -> None:
    path = tmp_path / "weights.pt"
    state = {**build_initialized_model(normed()).state_dict(), **change}
    torch.save({name: value for name, value in state.items() if value is not None}, path)
    model = build_initialized_model(normed())
    with pytest.raises(InputError) as refusal:
        load_weights(model, Weights(path=str(path), skip=skip))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def train_steps(job: Job, steps: int = 3) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights and buffers before and after some steps."""
    session = build_session(job, Plan(), world(), lambda activity: None)
    before = {name: value.clone() for name, value in session.state_dict().items()}
    train, evaluation = build_data(job)
    for _, batch in zip(range(steps), session.batches(train, global_batch=10), strict=False):
        session.step(batch)
        session.evaluate(evaluation or train)  # an evaluation must leave frozen modules in evaluation mode
    return before, session.state_dict()


def test_frozen_modules_keep_weights_and_statistics() -> None:
    before, after = train_steps(normed(train={"freeze": ["body"]}, optimizer={"weight_decay": 0.5}))
    for name in before:
        assert torch.equal(before[name], after[name]) == name.startswith("body"), name


def test_without_freezing_everything_changes() -> None:
    before, after = train_steps(normed())
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_a_part_of_a_module_can_be_frozen() -> None:
    before, after = train_steps(normed(train={"freeze": ["body.1", "*.bias"]}))
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith("body.1") or name.endswith(".bias")}


def learning_rates(per: str | None, train: dict[str, Any], accumulation: int = 1) -> list[float]:
    """The learning rate of every step."""
    schedule: dict[str, Any] = {"call": "torch.optim.lr_scheduler:StepLR", "step_size": 1, "gamma": 0.5}
    if per:
        schedule["per"] = per
    job = toy_job(schedule=schedule, train=train, optimizer={"call": "torch.optim:SGD", "lr": 1.0})
    plan = Plan.model_validate({"memory": {"accumulation": accumulation}})
    session = build_session(job, plan, world(), lambda activity: None)
    values = []
    for batch in session.batches(build_data(job)[0], epochs=2, global_batch=25):
        values.append(session.optimizer.param_groups[0]["lr"])
        session.step(batch)
    return values


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_schedule_counts_epochs_or_optimizer_steps(accumulation: int) -> None:
    assert learning_rates("epoch", {"epochs": 2}, accumulation) == [1, 1, 0.5, 0.5]
    assert learning_rates("step", {"epochs": 2}, accumulation) == [1, 0.5, 0.25, 0.125]


def test_a_schedule_counts_epochs_when_the_job_does() -> None:
    assert learning_rates(None, {"epochs": 2}) == [1, 1, 0.5, 0.5]
    assert learning_rates(None, {"epochs": None, "steps": 4}) == [1, 0.5, 0.25, 0.125]


def missing_folder() -> list[int]:
    raise FileNotFoundError("Couldn't find any class folder in /nowhere")


def test_a_data_set_that_finds_no_files_is_reported_in_one_line() -> None:
    job = toy_job(data={"train": {"call": "tests.train.test_build:missing_folder"}})
    with pytest.raises(InputError, match=r"^data.train: .*Couldn't find any class folder in /nowhere"):
        build_data(job)


def failing() -> None:
    raise ValueError("the split is\nunknown")


def test_a_data_set_that_fails_is_reported_in_one_line() -> None:
    job = toy_job(data={"train": {"call": "tests.train.test_build:failing"}})
    with pytest.raises(InputError, match=r"^data.train: .*ValueError: the split is unknown \(.*test_build\.py, line"):
        build_data(job)


def test_what_a_constructor_of_a_library_raises_is_an_input_error() -> None:
    job = toy_job(model={"call": "torch.nn:Linear", "in_features": -1, "out_features": 2})
    with pytest.raises(InputError, match=r"^model: torch.nn:Linear failed: RuntimeError: .*negative dimension -1"):
        _ = JobParts(job).model
