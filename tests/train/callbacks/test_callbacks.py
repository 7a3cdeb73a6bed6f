"""Callbacks of a job: when they are called, on which ranks, and how they end a run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError, UserCodeError
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.train.check import check_job
from meshwright.train.output.folder import job_differences, lock_run_folder, read_result, write_job_and_plan
from meshwright.train.step.divergence import LossReader
from meshwright.train.trainer import Trainer
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.train.one_process import EVALUATED, equal_states, session_of, toy_job, train
from tests.train.toy import Net

PART = "tests.train.callbacks.recorder:"


def callback_job(*callbacks: dict[str, Any], **sections: Any) -> Job:
    data = {"data": EVALUATED["data"], "metrics": EVALUATED["metrics"]}
    return toy_job(**{**data, "checkpoint": {"every_steps": 4}, **sections}, callbacks=list(callbacks))


def recorder(**options: Any) -> dict[str, Any]:
    return {"call": f"{PART}Recorder", **options}


def calls(folder: Path, rank: int = 0) -> list[str]:
    file = folder / f"calls-{rank}"
    return file.read_text().splitlines() if file.exists() else []


def test_each_event_is_called_in_order(tmp_path: Path) -> None:
    train(callback_job(recorder()), tmp_path)
    assert calls(tmp_path) == [
        "begin toy one rank · fp32 1 0",
        *[f"step {step}" for step in (1, 2, 3, 4)],
        "save step-00000004",
        "step 5",
        "evaluation 5 accuracy loss",
        *[f"step {step}" for step in (6, 7, 8)],
        "save step-00000008",
        *[f"step {step}" for step in (9, 10)],
        "evaluation 10 accuracy loss",
        "save step-00000010",
        "end 10",
    ]


class DelayedReader(LossReader):
    """Returns the loss of a step when the step after the next one was taken, as on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[tuple[int, float]] = []

    def read(self, step: int, loss: Tensor) -> list[tuple[int, float]]:
        self.pending.append((step, float(loss)))
        return [self.pending.pop(0)] if len(self.pending) > 2 else []

    def read_remaining(self) -> list[tuple[int, float]]:
        remaining, self.pending = self.pending, []
        return remaining


def test_losses_that_are_read_later_still_come_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(callback_job(recorder()), tmp_path / "at once")
    monkeypatch.setattr("meshwright.train.callbacks.callbacks.LossReader", DelayedReader)
    train(callback_job(recorder()), tmp_path / "delayed")
    assert calls(tmp_path / "delayed") == calls(tmp_path / "at once")


def test_a_signal_ends_with_none_and_a_resumed_run_begins_again(tmp_path: Path) -> None:
    train(callback_job(recorder()), tmp_path, stop_after=4)
    assert calls(tmp_path)[-2:] == ["save step-00000004", "end None"]
    train(callback_job(recorder()), tmp_path)
    assert calls(tmp_path)[7:9] == ["begin toy one rank · fp32 1 4", "step 5"]


def run_on_rank(rank: int, size: int, job: Job, folder: Path) -> int:
    return train(job, folder, rank=rank, size=size).session.steps


def test_callbacks_run_on_rank_0_unless_they_say_every_rank(tmp_path: Path, two: RankPool) -> None:
    one, all_ranks = tmp_path / "one", tmp_path / "all"
    two.run(run_on_rank, callback_job(recorder()), one)
    assert len(calls(one, 0)) == 17
    assert calls(one, 1) == []
    two.run(run_on_rank, callback_job(recorder(every_rank=True)), all_ranks)
    assert calls(all_ranks, 0) == calls(all_ranks, 1) == calls(one, 0)


def test_all_ranks_stop_after_the_step_in_which_a_callback_asks(tmp_path: Path, two: RankPool) -> None:
    assert two.run(run_on_rank, callback_job(recorder(stop_at=6)), tmp_path) == [6, 6]
    assert calls(tmp_path)[-4:] == ["step 6", "evaluation 6 accuracy loss", "save step-00000006", "end 6"]


def test_a_run_that_a_callback_ends_is_finished_and_says_why(tmp_path: Path) -> None:
    job = callback_job(recorder(stop_at=6), output=str(tmp_path))
    locked = lock_run_folder(job, "auto")
    write_job_and_plan(locked.folder, job, Plan())
    trainer = train(job, locked.folder.path)
    result = read_result(trainer.folder)
    assert result is not None
    assert (result["steps"], result["stopped"]) == (6, "enough steps")
    locked.lock.close()
    again = lock_run_folder(job, "auto")
    assert again.is_new  # the run is not resumed unless it is named
    again.lock.close()
    locked.folder.logs.mkdir()
    named = lock_run_folder(job, str(locked.folder.path))
    write_job_and_plan(named.folder, job, Plan())
    assert train(job, named.folder.path).session.steps == 10
    named.lock.close()


def test_an_error_names_the_callback_and_the_line(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError) as caught:
        train(callback_job(recorder(fail_at=3)), tmp_path)
    assert str(caught.value).startswith(f"callbacks[0] ({PART}Recorder).step: ValueError: no more disk quota (")
    assert "recorder.py, line" in str(caught.value)


def test_an_object_without_the_methods_is_refused_before_ranks_start() -> None:
    job = callback_job({"call": f"{PART}Nothing"})
    with pytest.raises(InputError, match=r"callbacks\[0\]: .*Nothing, which has none of the methods begin, step, eval"):
        check_job(job, Plan(), find_cluster("1xcpu"))


def test_callbacks_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    locked = lock_run_folder(job := callback_job(output=str(tmp_path)), "auto")
    write_job_and_plan(locked.folder, job, Plan())
    assert job_differences(callback_job(recorder(), output=str(tmp_path)), locked.folder) == []
    locked.lock.close()


# ---- the model in a callback

OUTPUTS = {"call": f"{PART}Outputs"}


def outputs(folder: Path, rank: int = 0) -> list[float]:
    return [float(line) for line in (folder / f"outputs-{rank}").read_text().splitlines()]


def final_weights(rank: int, size: int, job: Job, folder: Path) -> dict[str, Any]:
    return session_of(train(job, folder, rank=rank, size=size)).state_dict()


@pytest.mark.parametrize("axes", all_but([{"shard": 2}], [{"shard": 2}, {"tensor": 2}]))
def test_a_callback_of_every_rank_can_call_the_model(tmp_path: Path, two: RankPool, axes: dict[str, int]) -> None:
    plan = {"axes": axes}
    with_callback, without = tmp_path / "with", tmp_path / "without"
    weights = two.run(final_weights, callback_job(OUTPUTS, plan=plan), with_callback)
    assert equal_states(weights[0], two.run(final_weights, callback_job(plan=plan), without)[0])
    assert len(outputs(with_callback)) == 2
    assert outputs(with_callback, 0) == pytest.approx(outputs(with_callback, 1))
    assert outputs(with_callback)[1] == pytest.approx(output_of(weights[0]), rel=1e-5)


def output_of(weights: dict[str, Any]) -> float:
    model = Net(hidden=8)
    model.load_state_dict(weights)
    with torch.no_grad():
        return float(model.eval()(torch.ones(3, 20)).double().sum())


def test_a_model_in_stages_cannot_be_called(tmp_path: Path) -> None:
    trainer: Trainer = train(callback_job(), tmp_path)
    trainer.session.plan = Plan.model_validate({"axes": {"pipeline": 2}})  # type: ignore[misc]
    with pytest.raises(InputError, match=r"run\.model: each rank has only some layers of the model"):
        _ = trainer.callbacks._run.model
