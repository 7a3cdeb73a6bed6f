"""A job from its start or its newest checkpoint to its end: what is logged, evaluated, saved and resumed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from meshwright.checkpoint.manifest import read_manifest
from meshwright.errors import CheckpointError
from meshwright.job import Job
from meshwright.processes.signals import StopRequest
from meshwright.train.output.checkpoints import BestCheckpoint
from meshwright.train.output.folder import read_result
from meshwright.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.one_process import EVALUATED, equal_states, make_trainer, session_of, toy_job, train
from tests.train.toy import points

STEPS = 10  # 2 epochs of 5


class Stream(IterableDataset[Any]):
    """The toy's points one after another, in an order that follows the epoch."""

    def __init__(self, size: int = 53) -> None:
        self.size = size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        data = points(self.size)
        return (data[(index + 7 * self.epoch) % self.size] for index in range(self.size))


STREAM: dict[str, Any] = {"data": {"train": {"call": "tests.train.test_trainer:Stream"}}}
SCHEDULE = {"call": "torch.optim.lr_scheduler:CosineAnnealingLR", "T_max": 20, "per": "step"}

PRESET_VALUES: list[float] = []  # the values that `PresetMetric` returns, one per evaluation


class PresetMetric:
    """A metric whose values a test sets."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return torch.zeros(1)

    def finish(self, total: Tensor) -> float:
        return PRESET_VALUES.pop(0)


def preset_metric_job(values: list[float], better: str = "higher", **checkpoint: Any) -> Job:
    """A job that evaluates after every step, with these values of its metric."""
    PRESET_VALUES[:] = values
    return toy_job(
        data=EVALUATED["data"],
        metrics={"preset": {"call": "tests.train.test_trainer:PresetMetric"}},
        log={"eval_every_steps": 1},
        train={"epochs": None, "steps": len(values)},
        checkpoint={"best": "preset", "better": better, **checkpoint},
    )


def checkpoints(trainer: Trainer) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in sorted(trainer.folder.checkpoints.glob("step-*"))]


def best(trainer: Trainer) -> int:
    return int((trainer.folder.checkpoints / "best").resolve().name.removeprefix("step-"))


def logged(trainer: Trainer, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in trainer.folder.metrics.read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if k not in ("time", "samples_per_s")} for line in lines if line["kind"] == kind
    ]


# ---- the end


def test_a_finished_run_has_a_result_metrics_and_a_checkpoint(tmp_path: Path) -> None:
    trainer = train(toy_job(**EVALUATED, log={"every_steps": 3, "tensorboard": True}), tmp_path)
    result = read_result(trainer.folder)
    assert result is not None
    assert set(result) == {
        "run",
        "steps",
        "loss",
        "metrics",
        "samples_per_s",
        "loader_share",
        "skipped_steps",
        "restarts",
        "predicted_step_s",
        "measured_step_s",
        "save_stall_s",
        "save_s",
        "recovery_s",
        "recovery_parts_s",
        "spare_memory_bytes",
        "peak_memory_bytes",
    }
    assert (result["steps"], result["run"], set(result["metrics"])) == (STEPS, str(tmp_path), {"accuracy", "loss"})
    assert result["samples_per_s"] > 0
    assert result["peak_memory_bytes"] > 0
    assert checkpoints(trainer) == [STEPS]
    assert [line["step"] for line in logged(trainer, "train")] == [3, 6, 9, 10]
    assert [(line["step"], line["epoch"]) for line in logged(trainer, "eval")] == [(5, 1), (10, 2)]
    assert list(trainer.folder.events.glob("events.out.tfevents.*"))


def test_a_run_ends_after_epochs_or_steps_whichever_comes_first(tmp_path: Path) -> None:
    lengths: list[tuple[dict[str, Any], int]] = [
        ({"steps": 7}, 7),
        ({"steps": 70}, STEPS),
        ({"epochs": None, "steps": 12}, 12),
    ]
    for number, (length, steps) in enumerate(lengths):
        trainer = train(toy_job(train=length), tmp_path / str(number))
        assert trainer.session.steps == trainer.length.total_steps() == steps


def test_evaluations_come_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    trainer = train(toy_job(**EVALUATED, log={"eval_every_steps": 4}), tmp_path)
    assert [line["step"] for line in logged(trainer, "eval")] == [4, 8, 10]


def test_lines_say_where_the_run_is_and_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(toy_job(**EVALUATED), tmp_path)
    printed = capsys.readouterr().err
    assert f"training on 1 CPU rank (one rank · fp32) in {tmp_path}" in printed
    assert "step 10 of 10: loss " in printed
    assert "evaluation after step 10: accuracy " in printed


def test_the_evaluation_at_the_end_is_logged_once_and_can_be_stopped(tmp_path: Path) -> None:
    job = toy_job(**EVALUATED, train={"steps": 7}, checkpoint={"every_steps": 7})
    stopped = train(job, tmp_path, stop_after=7)
    assert (logged(stopped, "eval")[1:], checkpoints(stopped)) == ([], [7])
    for _ in range(3):
        assert [line["step"] for line in logged(train(job, tmp_path), "eval")] == [5, 7]


# ---- which checkpoints are kept


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    assert checkpoints(train(toy_job(checkpoint={"every_steps": 2, "keep": 3}), tmp_path)) == [6, 8, 10]


def test_the_best_checkpoint_is_kept_besides(tmp_path: Path) -> None:
    trainer = train(preset_metric_job([0.1, 0.9, 0.3, 0.4, 0.5, 0.6], every_steps=1, keep=2), tmp_path)
    assert checkpoints(trainer) == [2, 5, 6]
    assert best(trainer) == 2


def test_the_best_checkpoint_is_kept_in_a_relative_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = train(preset_metric_job([0.1, 0.9, 0.3, 0.4, 0.5], every_steps=1, keep=1), Path("run"))
    assert checkpoints(trainer) == [2, 5]
    assert best(trainer) == 2


@pytest.mark.parametrize(
    ("values", "better", "expected"),
    [
        ([0.1, 0.9, 0.3], "higher", 2),
        ([0.3, 0.1, 0.9], "lower", 2),
        ([0.5, 0.5, 0.5], "higher", 1),
        ([float("nan"), 0.5, 0.4], "higher", 2),
        ([float("nan"), 0.5, 0.4], "lower", 3),
    ],
)
def test_the_best_is_by_value_and_the_first_of_equals(
    tmp_path: Path, values: list[float], better: str, expected: int
) -> None:
    assert best(train(preset_metric_job(values, better), tmp_path)) == expected


@pytest.mark.parametrize(("name", "lower"), [("loss", True), ("mean_error", True), ("accuracy", False), ("f1", False)])
def test_losses_and_errors_are_better_lower(tmp_path: Path, name: str, lower: bool) -> None:
    metrics = {} if name == "loss" else {name: {"call": "meshwright.train.metrics:accuracy"}}
    trainer = make_trainer(toy_job(data=EVALUATED["data"], metrics=metrics, checkpoint={"best": name}), tmp_path)
    assert trainer.checkpoints.is_better(0.5, None)
    best = BestCheckpoint(1, 0.5)
    assert trainer.checkpoints.is_better(0.4, best) is lower
    assert trainer.checkpoints.is_better(0.6, best) is not lower


def test_the_best_is_remembered_over_a_restart(tmp_path: Path) -> None:
    values = [0.9, 0.5, 0.6, 0.7]
    train(preset_metric_job(values[:2]), tmp_path)
    job = preset_metric_job(values)
    PRESET_VALUES[:] = values[2:]
    trainer = train(job, tmp_path)
    assert best(trainer) == 1


def test_an_infinite_best_survives_a_restart(tmp_path: Path) -> None:
    train(preset_metric_job([float("inf"), float("inf")], "lower"), tmp_path)
    job = preset_metric_job([0.0, 0.0, 1.0], "lower")
    PRESET_VALUES[:] = [1.0]
    trainer = train(job, tmp_path)
    assert best(trainer) == 3


# ---- resuming


@pytest.mark.parametrize(("kind", "stop"), [("points", 3), ("points", 5), ("stream", 4), ("stream", 6), ("stream", 8)])
def test_a_stopped_run_resumes_bitwise(tmp_path: Path, kind: str, stop: int) -> None:
    job = toy_job(**EVALUATED, schedule=SCHEDULE) if kind == "points" else toy_job(**STREAM, schedule=SCHEDULE)
    undisturbed = train(job, tmp_path / "undisturbed")
    stopped = train(job, tmp_path / "stopped", stop_after=stop)
    assert stopped.session.steps == stop
    assert read_result(stopped.folder) is None
    again = train(job, tmp_path / "stopped")
    assert equal_states(session_of(again).state_dict(), session_of(undisturbed).state_dict())
    assert again.session.optimizer.param_groups[0]["lr"] == undisturbed.session.optimizer.param_groups[0]["lr"]
    assert logged(again, "train") == logged(undisturbed, "train")
    assert logged(again, "eval") == logged(undisturbed, "eval")
    first, second = read_result(again.folder), read_result(undisturbed.folder)
    assert first is not None
    assert second is not None
    assert (first["loss"], first["metrics"]) == (second["loss"], second["metrics"])


def test_a_stream_counts_its_steps_by_reading_them(tmp_path: Path) -> None:
    trainer = train(toy_job(**STREAM), tmp_path)
    assert trainer.length.total_steps() is None
    assert trainer.session.steps == 12
    assert [line["epoch"] for line in logged(trainer, "train")] == [0] * 6 + [1] * 6


def test_steps_after_the_checkpoint_are_logged_once(tmp_path: Path) -> None:
    job = toy_job(checkpoint={"every_steps": 4})
    undisturbed = train(job, tmp_path / "undisturbed")

    class Killed(BaseException):
        pass

    trainer = make_trainer(job, tmp_path / "killed")
    step = trainer.session.step

    def dying(batch: Any) -> Tensor:
        if trainer.session.steps == 7:
            raise Killed
        return step(batch)

    trainer.session.step = dying  # type: ignore[method-assign]
    with pytest.raises(Killed):
        trainer.run(StopRequest())
    assert [line["step"] for line in logged(trainer, "train")] == list(range(1, 8))
    again = train(job, tmp_path / "killed")
    assert logged(again, "train") == logged(undisturbed, "train")
    assert equal_states(session_of(again).state_dict(), session_of(undisturbed).state_dict())


def test_a_finished_run_can_be_extended(tmp_path: Path) -> None:
    short = train(toy_job(**EVALUATED), tmp_path / "extended")
    assert short.session.steps == STEPS
    extended = train(toy_job(**EVALUATED, train={"epochs": 3}), tmp_path / "extended")
    whole = train(toy_job(**EVALUATED, train={"epochs": 3}), tmp_path / "whole")
    assert extended.session.steps == 15
    assert equal_states(session_of(extended).state_dict(), session_of(whole).state_dict())
    assert logged(extended, "eval") == logged(whole, "eval")


def test_a_finished_run_started_again_has_the_same_result(tmp_path: Path) -> None:
    first = read_result(train(toy_job(**EVALUATED), tmp_path).folder)
    trainer = train(toy_job(**EVALUATED), tmp_path)
    again = read_result(trainer.folder)
    assert first is not None
    assert again is not None
    for key in ("steps", "loss", "metrics"):
        assert again[key] == first[key]
    assert len(logged(trainer, "train")) == STEPS


def test_an_evaluation_that_a_stop_interrupted_is_repeated(tmp_path: Path) -> None:
    job = toy_job(**EVALUATED)
    stopped = train(job, tmp_path, stop_after=5)  # asked for while the evaluation after step 5 runs
    assert logged(stopped, "eval") == []
    assert [line["step"] for line in logged(train(job, tmp_path), "eval")] == [5, 10]


def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = toy_job(checkpoint={"every_steps": 2})
    undisturbed = train(job, tmp_path / "undisturbed")
    stopped = train(job, tmp_path / "damaged", stop_after=5)
    newest = stopped.folder.checkpoints / "step-00000005"
    data = next(newest.glob("*.bin"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    capsys.readouterr()
    again = train(job, tmp_path / "damaged")
    printed = capsys.readouterr().err
    assert f"checkpoint left out: {newest}: {data.name} does not have the checksum" in printed
    assert "resuming after step 4" in printed
    assert equal_states(session_of(again).state_dict(), session_of(undisturbed).state_dict())


def test_a_damaged_checkpoint_does_not_replace_a_valid_one(tmp_path: Path) -> None:
    trainer = train(toy_job(checkpoint={"every_steps": 4}), tmp_path, stop_after=7)
    (trainer.folder.checkpoints / "step-00000007" / "manifest.json").unlink()
    again = train(toy_job(checkpoint={"every_steps": None, "keep": 1}), tmp_path, stop_after=6)
    assert 6 in checkpoints(again), "what was saved last is there"


def test_a_run_without_a_usable_checkpoint_does_not_begin_again(tmp_path: Path) -> None:
    """It would delete them, although a key that is set by mistake may be the only reason."""
    job = toy_job(checkpoint={"every_steps": 2, "keep": 9})
    stopped = train(job, tmp_path, stop_after=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_KEY", "secret")
        with pytest.raises(CheckpointError, match=r"none of the 3 checkpoints in .* can be used: .* is not signed"):
            train(job, tmp_path)
    assert checkpoints(stopped) == [2, 4, 5]
    train(job, tmp_path)


def test_a_checkpoint_contains_its_position_and_plan(tmp_path: Path) -> None:
    trainer = train(toy_job(**EVALUATED), tmp_path, stop_after=7)
    about = read_manifest(trainer.folder.checkpoints / "step-00000007").about
    assert (about["step"], about["position"], about["seed"]) == (7, [1, 2], 3)
    assert about["plan"]["axes"]["replicate"] == 1
    assert about["evaluated"][0] == 5


# ---- ranks


def train_on_ranks(
    rank: int, size: int, folder: Path
) -> tuple[dict[str, Tensor], list[dict[str, Any]], dict[str, Any]]:
    """Undisturbed; then stopped and gone on with; both evaluate on uneven shares."""
    job = toy_job(**EVALUATED, checkpoint={"every_steps": 4, "keep": 1, "best": "accuracy"})
    undisturbed = train(job, folder / "undisturbed", rank=rank, size=size)
    train(job, folder / "stopped", stop_after=7, rank=rank, size=size)
    again = train(job, folder / "stopped", rank=rank, size=size)
    assert equal_states(session_of(again).state_dict(), session_of(undisturbed).state_dict())
    torch.distributed.barrier()
    result = read_result(again.folder)
    assert result is not None
    return session_of(again).state_dict(), logged(again, "train"), result


def test_ranks_stop_together_and_only_one_writes(tmp_path: Path) -> None:
    results = run_ranks(train_on_ranks, 2, tmp_path)
    assert equal_states(results[0][0], results[1][0])
    assert [line["step"] for line in results[0][1]] == list(range(1, STEPS + 1))
    _, _, result = results[0]
    assert (result["steps"], result["restarts"]) == (STEPS, 0)
    assert (tmp_path / "stopped" / "checkpoints" / "best").is_symlink()
