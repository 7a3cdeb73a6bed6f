"""An exception out of the user's code ends training with an error, never as a success: wherever it is raised, and
whichever it is."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from meshwright import parallelize
from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError, RankError, UserCodeError
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.processes.local.fork_server import preloaded
from meshwright.train.check import check_job
from meshwright.train.metrics import accuracy
from meshwright.train.run import train as run
from meshwright.user.code import user_position
from tests.ranks import RankPool
from tests.train.one_process import EVALUATED, toy_job, train
from tests.train.toy import Net, points

STEPS = 8
FAILS_AT = 3  # the call in which a part fails
PART = "tests.train.test_user_code:"

Failure = Callable[[], Any]


def stop_iteration() -> None:
    raise StopIteration


FAILURES: dict[str, Failure] = {
    "StopIteration": stop_iteration,
    "exit": lambda: sys.exit(0),
    "os._exit": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


class Calls:
    """Counts the calls of a part of a job, and fails in call number `FAILS_AT`."""

    def __init__(self, failure: str) -> None:
        self.failure = FAILURES[failure]
        self.count = 0

    def add(self) -> None:
        self.count += 1
        if self.count == FAILS_AT:
            self.failure()


class Data(Dataset[Any]):
    def __init__(self, failure: str, size: int = 50) -> None:
        self.calls, self.points = Calls(failure), points(size)

    def __len__(self) -> int:
        return len(self.points)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        self.calls.add()
        return self.points[index]


class Collate:
    def __init__(self, failure: str) -> None:
        self.calls = Calls(failure)

    def __call__(self, samples: list[Any]) -> Any:
        self.calls.add()
        return torch.utils.data.default_collate(samples)


class Model(Net):
    def __init__(self, failure: str) -> None:
        super().__init__(hidden=8)
        self.calls = Calls(failure)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add()
        return super().forward(x)


class Loss(nn.CrossEntropyLoss):
    def __init__(self, failure: str) -> None:
        super().__init__()
        self.calls = Calls(failure)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls.add()
        return super().forward(output, target)


class FailingMetric:
    def __init__(self, failure: str) -> None:
        self.calls = Calls(failure)

    def __call__(self, output: Tensor, target: Tensor) -> Any:
        self.calls.add()
        return accuracy(output, target)


class FailingSGD(torch.optim.SGD):
    def __init__(self, params: Any, failure: str) -> None:
        super().__init__(params, lr=0.1)
        self.calls = Calls(failure)

    def step(self, closure: Any = None) -> Any:
        self.calls.add()
        return super().step(closure)


class FailingSchedule(torch.optim.lr_scheduler.StepLR):
    def __init__(self, optimizer: torch.optim.Optimizer, failure: str) -> None:
        self.calls = Calls(failure)
        super().__init__(optimizer, step_size=1)

    def step(self, epoch: int | None = None) -> None:
        self.calls.add()
        super().step(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Without the counter, which a checkpoint cannot hold."""
        return {key: value for key, value in super().state_dict().items() if key != "calls"}


def sections_with(part: str, failure: str, workers: int = 0) -> dict[str, Any]:
    """The sections of a job in which this part fails."""
    evaluated = {**EVALUATED["data"], "workers": workers}
    return {
        "data set": {"data": {**evaluated, "train": {"call": f"{PART}Data", "failure": failure}}},
        "evaluation set": {"data": {**evaluated, "eval": {"call": f"{PART}Data", "failure": failure}}},
        "collate": {"data": {**evaluated, "collate": {"call": f"{PART}Collate", "failure": failure}}},
        "model": {"model": {"call": f"{PART}Model", "failure": failure}},
        "loss": {"loss": {"call": f"{PART}Loss", "failure": failure}},
        "metric": {**EVALUATED, "metrics": {"odd": {"call": f"{PART}FailingMetric", "failure": failure}}},
        "optimizer": {"optimizer": {"call": f"{PART}FailingSGD", "failure": failure}},
        "schedule": {"schedule": {"call": f"{PART}FailingSchedule", "failure": failure, "per": "step"}},
    }[part]


PARTS = ["data set", "evaluation set", "collate", "model", "loss", "metric", "optimizer", "schedule"]


def job_with(part: str, failure: str, workers: int = 0) -> Job:
    return toy_job(train={"epochs": None, "steps": STEPS}, **sections_with(part, failure, workers))


def raised_by(job: Job, folder: Path, rank: int = 0, size: int = 1) -> tuple[str, str, bool]:
    """Trains, and returns the class and message of the exception, and whether it came through this file's code."""
    try:
        train(job, folder, rank=rank, size=size)
    except BaseException as error:
        return type(error).__name__, str(error), user_position(error) is not None
    raise AssertionError("training has ended as a success")


@pytest.mark.parametrize("part", PARTS)
def test_stop_iteration_is_not_the_end_of_the_data(tmp_path: Path, part: str) -> None:
    kind, message, has_position = raised_by(job_with(part, "StopIteration"), tmp_path)
    assert has_position
    if part in ("data set", "evaluation set"):
        assert kind == "UserCodeError"
        assert message.startswith("sample ")
        assert "test_user_code.py, line" in message
    assert not list(tmp_path.glob("result*"))


@pytest.mark.parametrize("part", ["data set", "evaluation set", "collate"])
def test_stop_iteration_in_a_worker_is_not_the_end_of_the_data(tmp_path: Path, part: str) -> None:
    kind, message, _ = raised_by(job_with(part, "StopIteration", workers=1), tmp_path)
    assert kind == "UserCodeError"
    assert "StopIteration (" in message
    assert "test_user_code.py, line" in message


def train_failing(rank: int, size: int, part: str, folder: str) -> tuple[str, str, bool]:
    return raised_by(job_with(part, "StopIteration"), Path(folder), rank, size)


@pytest.mark.parametrize("part", ["data set", "model"])
def test_stop_iteration_is_an_error_on_two_ranks(tmp_path: Path, two: RankPool, part: str) -> None:
    for kind, _, has_position in two.run(train_failing, part, str(tmp_path)):
        assert kind == ("UserCodeError" if part == "data set" else "StopIteration")
        assert has_position


@pytest.mark.parametrize("length", [-3, 2.5, 10**30])
def test_a_length_that_is_no_number_of_samples_is_refused_before_ranks_start(length: float) -> None:
    job = toy_job(data={"train": {"call": f"{PART}Sized", "length": length}})
    with pytest.raises(UserCodeError, match=r"^the length of data\.train is .*, but .*test_user_code\.py, line \d+\)$"):
        check_job(job, Plan(), find_cluster("1xcpu"))


class Sized(Dataset[Any]):
    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> int:
        length: int = self.length
        return length

    def __getitem__(self, index: int) -> Any: ...


# ---- optimizers of other tensors than the model's parameters

OTHER_MODEL = nn.Linear(3, 2)


def foreign_optimizer(params: Any) -> torch.optim.Optimizer:
    """Adds a group of tensors that are not the model's."""
    groups: list[dict[str, Any]] = [*params, {"params": OTHER_MODEL.parameters()}]
    return torch.optim.AdamW(groups)


def partial_optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params[0]["params"][:2], lr=0.1)


class IgnoresItsParameters(torch.optim.SGD):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(OTHER_MODEL.parameters(), lr)


FOREIGN = r"2 of 2 tensors in parameter group \d are not parameters of the model: make the optimizer of"


@pytest.mark.parametrize("name", ["foreign_optimizer", "IgnoresItsParameters"])
def test_an_optimizer_of_other_tensors_is_refused_before_the_first_step(tmp_path: Path, name: str) -> None:
    job = toy_job(optimizer={"call": PART + name})
    with pytest.raises(InputError, match=f"^optimizer: {PART}{name}: {FOREIGN}"):
        train(job, tmp_path)
    with pytest.raises(InputError, match=FOREIGN):
        check_job(job, Plan(), find_cluster("1xcpu"))


def test_an_optimizer_of_some_parameters_is_allowed(tmp_path: Path) -> None:
    trained = train(toy_job(optimizer={"call": f"{PART}partial_optimizer"}), tmp_path)
    assert trained.session.steps == 10


def test_parallelize_refuses_an_optimizer_class_that_ignores_its_parameters() -> None:
    model = nn.Linear(3, 2)
    template = IgnoresItsParameters(None)
    template.param_groups[0]["params"] = list(model.parameters())
    with pytest.raises(InputError, match=f"^optimizer: IgnoresItsParameters: {FOREIGN}"):
        parallelize(model, template, loss=nn.CrossEntropyLoss(), device="cpu")


# ---- a working folder that the user's code leaves


class Leaves(Net):
    """A model that changes the working folder, as code does that reads files of its own."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        os.chdir(folder)

    def forward(self, points: Tensor) -> Tensor:
        os.chdir(self.folder)
        return super().forward(points)


def test_code_that_leaves_the_working_folder_does_not_move_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "begun", tmp_path / "left"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.chdir(folders[0])
    job = toy_job(
        model={"call": f"{PART}Leaves", "folder": str(folders[1])}, train={"epochs": None, "steps": 2}, output="runs"
    )
    result = run(job, Plan(), find_cluster("1xcpu"))
    assert Path(result["run"]).parent == folders[0] / "runs"
    assert list(folders[1].iterdir()) == []
    assert Path.cwd() == folders[0]


# ---- whole runs


@pytest.fixture(scope="module")
def fork_server() -> Iterator[None]:
    """The ranks of all runs are forked from one process."""
    with preloaded("meshwright.train.rank"):
        yield


@pytest.mark.soak
@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize(
    ("part", "workers"), [*((part, 0) for part in PARTS), ("data set", 1), ("evaluation set", 1), ("collate", 1)]
)
def test_a_run_in_which_a_part_fails_says_where(
    tmp_path: Path, part: str, failure: str, workers: int, ranks: int
) -> None:
    sections = sections_with(part, failure, workers)
    job = toy_job(train={"epochs": None, "steps": STEPS, "restarts": 0}, output=str(tmp_path), **sections)
    with pytest.raises(RankError) as caught:
        run(job, Plan.model_validate({"axes": {"replicate": ranks}}), find_cluster(f"{ranks}xcpu"))
    message = str(caught.value)
    assert not list(tmp_path.rglob("result.json"))
    # Two ranks compare a few samples of the training data, and read them themselves, before any worker does.
    in_worker = workers and not (part == "data set" and ranks == 2)
    if in_worker and failure in ("kill", "os._exit"):
        assert "a data loader worker (process" in message
    elif failure == "kill":
        assert "was killed by SIGKILL" in message
    else:
        assert "test_user_code.py, line" in message
