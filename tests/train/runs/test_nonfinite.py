"""NaN and infinite numbers that are planted into a run: each `train.on_nonfinite` ends as promised, on one and two
ranks, and no checkpoint has them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.checkpoint.load import find_newest_valid
from meshwright.data.order import permutation
from meshwright.errors import TrainingDiverged
from meshwright.processes.signals import StopRequest
from meshwright.train.output.folder import read_result
from meshwright.train.step.divergence import MOST_SKIPPED_STEPS
from tests.cli.commands import run_in_process
from tests.ranks import RankPool
from tests.train import commands
from tests.train.one_process import BATCH, EVALUATED, SIZE, TOY, equal_states, make_trainer, session_of, toy_job, train
from tests.train.toy import Net, points

STEPS = 10  # two epochs of five batches
SEED = 3
BAD_SAMPLE = 38  # in the fourth batch of the first epoch, and in the third of the second
MARK = 1e3  # the first number of a sample whose gradient is made infinite
NAN, INF = float("nan"), float("inf")


def planted(size: int = SIZE, value: float = NAN, indices: list[int] | None = None) -> Any:
    """The toy's points, with `value` as the first number of some samples."""
    data: Any = points(size)
    for index in [BAD_SAMPLE] if indices is None else indices:
        data.tensors[0][index, 0] = value
    return data


class _InfiniteGradient(torch.autograd.Function):
    """Returns its input. Its gradient is infinite if `marked` is true."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, marked: Tensor) -> Tensor:
        ctx.save_for_backward(marked)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (marked,) = ctx.saved_tensors
        return torch.where(marked, INF, gradients[0]), None


class InfiniteGradient(Net):
    """The toy's model. A batch with a marked sample has a finite loss and an infinite gradient."""

    def forward(self, x: Tensor) -> Tensor:
        marked = x[:, 0] == MARK
        return _InfiniteGradient.apply(super().forward(torch.where(marked.unsqueeze(1), 0.0, x)), marked.any())


class Masked(Net):
    """The toy's model with a mask of -inf among its buffers."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.register_buffer("mask", torch.full((4, 4), -INF).triu(1))


def data(**arguments: Any) -> dict[str, Any]:
    return {"train": {"call": "tests.train.runs.test_nonfinite:planted", **arguments}}


SCHEDULE = {"call": "torch.optim.lr_scheduler:StepLR", "step_size": 3, "gamma": 0.5, "per": "step"}
PROBLEMS: dict[str, dict[str, Any]] = {
    "nan": {"data": data()},
    "inf": {"data": data(value=INF)},
    "gradient": {
        "data": data(value=MARK),
        "model": {"call": "tests.train.runs.test_nonfinite:InfiniteGradient", "hidden": 8},
    },
}
EVERY_SAMPLE: dict[str, Any] = {"data": data(indices=list(range(SIZE)))}


def bad_batch(epoch: int) -> tuple[int, int]:
    """The epoch and the index of the batch that has the bad sample."""
    return epoch, permutation(SEED, epoch, SIZE).tolist().index(BAD_SAMPLE) // BATCH


BAD_STEPS = [5 * epoch + bad_batch(epoch)[1] + 1 for epoch in (0, 1)]


@dataclass
class Outcome:
    """What is left of a run. `error` is the text of a `TrainingDiverged`, or empty."""

    error: str
    steps: int
    skipped: int
    state: dict[str, Any]
    moments: dict[str, Any]
    rate: float
    saved: list[int]
    about: dict[str, Any]
    log: list[dict[str, Any]]
    result: dict[str, Any] | None


def run(rank: int, size: int, folder: Path, on_nonfinite: str, sections: dict[str, Any], **options: Any) -> Outcome:
    """Trains the toy job with these sections, saving after every second step. With `stop_after`, it is stopped."""
    settings = {"on_nonfinite": on_nonfinite, **sections.get("train", {})}
    checkpoint = {"every_steps": 2, "keep": 2, **sections.get("checkpoint", {})}
    job = toy_job(schedule=SCHEDULE, **{**sections, "train": settings, "checkpoint": checkpoint})
    error = ""
    trainer = make_trainer(job, folder, rank, size)
    stop = options.get("stop_after")
    try:
        if stop is None:
            trainer.run(StopRequest())
        else:
            trainer = train(job, folder, stop, rank, size)
    except TrainingDiverged as diverged:
        error = str(diverged)
    if size > 1:
        torch.distributed.barrier()
    session = session_of(trainer)
    newest = find_newest_valid(trainer.folder.checkpoints)
    log = [json.loads(line) for line in trainer.folder.metrics.read_text().splitlines()]
    moments = session.optimizer.state_dict()["state"]
    return Outcome(
        error,
        session.steps,
        session.skipped_steps,
        session.state_dict(),
        {f"{number}.{name}": value for number, entry in moments.items() for name, value in entry.items()},
        session.optimizer.param_groups[0]["lr"],
        sorted(int(path.name.removeprefix("step-")) for path in trainer.folder.checkpoints.glob("step-*")),
        newest.manifest.about if newest.manifest else {},
        log,
        read_result(trainer.folder),
    )


def run_on(pool: RankPool | None, *arguments: Any) -> list[Outcome]:
    """The outcome on every rank of a pool; without one, in this process."""
    return [run(0, 1, *arguments)] if pool is None else pool.run(run, *arguments)


def without_bad_batches(rank: int, size: int, folder: Path, sections: dict[str, Any]) -> Any:
    """The state after the toy job's steps on all batches but the bad ones."""
    session = session_of(make_trainer(toy_job(schedule=SCHEDULE, **sections), folder, rank, size))
    for batch in session.batches(planted(), 2, BATCH):
        if (batch.epoch, batch.index) == bad_batch(batch.epoch):
            session.leave_out(batch)
        else:
            session.step(batch)
    return session.state_dict(), session.optimizer.param_groups[0]["lr"]


def all_finite(tensors: dict[str, Any]) -> bool:
    return all(bool(value.isfinite().all()) for value in tensors.values())


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def pool(request: pytest.FixtureRequest) -> RankPool | None:
    value: RankPool | None = None if request.param == 1 else request.getfixturevalue("two")
    return value


# ---- stop


@pytest.mark.parametrize("problem", ["nan", "inf"])
def test_a_run_stops_after_three_losses_in_a_row_and_keeps_good_checkpoints(
    pool: RankPool | None, tmp_path: Path, problem: str
) -> None:
    first = BAD_STEPS[0]
    for outcome in run_on(pool, tmp_path, "stop", PROBLEMS[problem]):
        assert outcome.error in (
            f"the loss is {value} since step {first}, for 3 steps in a row: look at the data of these steps, lower the"
            " learning rate, set train.clip_norm, or set train.on_nonfinite to skip or rewind"
            for value in ("nan", "inf")
        )
        assert (outcome.steps, outcome.result) == (first + 2, None)
        assert outcome.saved == [step for step in range(1, first) if step % 2 == 0][-2:]


@pytest.mark.parametrize("steps", [BAD_STEPS[0], BAD_STEPS[0] + 1])
def test_a_run_that_ends_with_a_bad_loss_does_not_succeed(tmp_path: Path, steps: int) -> None:
    (outcome,) = run_on(None, tmp_path, "stop", {**PROBLEMS["nan"], "train": {"steps": steps}})
    assert outcome.error.startswith(f"the loss is nan since step {BAD_STEPS[0]}, up to the last step: look at the")
    assert outcome.result is None


def test_a_run_whose_last_evaluation_has_a_bad_loss_saves_its_weights_and_does_not_succeed(tmp_path: Path) -> None:
    sets = {"train": {"call": "tests.train.toy:points"}, "eval": {"call": "tests.train.runs.test_nonfinite:planted"}}
    (outcome,) = run_on(None, tmp_path, "stop", {"data": sets, "train": {"steps": 3}})
    assert outcome.error == "evaluation after step 3: the loss is nan: look at the samples of data.eval"
    assert (outcome.saved[-1], outcome.result) == (3, None)


def test_a_run_whose_last_update_breaks_the_weights_does_not_succeed(tmp_path: Path) -> None:
    last = BAD_STEPS[0]
    sections = {**PROBLEMS["gradient"], "train": {"steps": last}, "checkpoint": {"every_steps": last - 1}}
    (outcome,) = run_on(None, tmp_path, "stop", sections)
    assert outcome.error == (
        f"the run ends after step {last}, which is not saved, because its weights or its optimizer state are not"
        f" finite; the newest one saved is {last - 1}"
    )
    assert (outcome.saved, outcome.result) == ([last - 1], None)


def test_the_command_ends_with_one_line_and_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job = {**TOY, **PROBLEMS["nan"], "plan": {"axes": {"replicate": 2}}}
    words, folder = commands.write_job(tmp_path, job, 2)
    result = run_in_process(monkeypatch, capfd, tuple(words))
    assert result.exit_code == 1
    last_line = result.stderr.splitlines()[-1]
    assert f"the loss is nan since step {BAD_STEPS[0]}, for 3 steps in a row: look at the" in last_line
    assert "start again" not in result.stderr
    assert "Traceback" not in result.stderr
    assert read_result(folder) is None


# ---- skip


@pytest.mark.parametrize("problem", list(PROBLEMS))
def test_a_skipped_step_changes_nothing_but_the_position(pool: RankPool | None, tmp_path: Path, problem: str) -> None:
    outcomes = run_on(pool, tmp_path / "run", "skip", PROBLEMS[problem])
    arguments = (tmp_path / "reference", {"model": PROBLEMS[problem].get("model", TOY["model"])})
    expected = [without_bad_batches(0, 1, *arguments)] if pool is None else pool.run(without_bad_batches, *arguments)
    for outcome, (state, rate) in zip(outcomes, expected, strict=True):
        assert not outcome.error
        assert (outcome.steps, outcome.skipped) == (STEPS, 2)
        assert equal_states(outcome.state, state), "running statistics, too"
        assert all_finite(outcome.moments)
        assert outcome.rate == rate
        assert outcome.result is not None
        assert outcome.result["skipped_steps"] == outcome.about["skipped"] == 2
        skipped = [line for line in outcome.log if line["kind"] == "skipped"]
        assert [(line["step"], line["skipped_steps"]) for line in skipped] == [(BAD_STEPS[0], 1), (BAD_STEPS[1], 2)]


def test_a_skipped_step_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(toy_job(train={"on_nonfinite": "skip"}, **PROBLEMS["nan"]), tmp_path / "loss")
    printed = capsys.readouterr().err
    assert f"step {BAD_STEPS[0]}: the loss is nan: its update is left out (1 so far)" in printed
    assert f"step {BAD_STEPS[1]}: the loss is nan: its update is left out (2 so far)" in printed
    train(toy_job(train={"on_nonfinite": "skip"}, **PROBLEMS["gradient"]), tmp_path / "gradient")
    printed = capsys.readouterr().err
    assert f"step {BAD_STEPS[0]}: a gradient is not finite: its update is left out (1 so far)" in printed


def test_the_count_of_skipped_steps_survives_a_stop(tmp_path: Path) -> None:
    run(0, 1, tmp_path, "skip", PROBLEMS["nan"], stop_after=BAD_STEPS[0] + 1)
    (outcome,) = run_on(None, tmp_path, "skip", PROBLEMS["nan"])
    assert outcome.skipped == 2


def test_a_run_that_only_skips_ends(pool: RankPool | None, tmp_path: Path) -> None:
    sections = {**EVERY_SAMPLE, "train": {"epochs": None, "steps": 40}}
    for outcome in run_on(pool, tmp_path, "skip", sections):
        assert outcome.error == (
            f"the loss is nan since step 1, for {MOST_SKIPPED_STEPS} steps in a row: look at the data of these steps,"
            " lower the learning rate, or set train.clip_norm"
        )
        assert (outcome.steps, outcome.result) == (MOST_SKIPPED_STEPS, None)


def test_a_short_run_that_only_skips_does_not_succeed(tmp_path: Path) -> None:
    (outcome,) = run_on(None, tmp_path, "skip", {**EVERY_SAMPLE, "train": {"steps": 8}})
    assert outcome.error.startswith("the updates of all 8 steps were left out: look at the data of these steps")
    assert outcome.result is None


def test_a_diverging_run_ends_though_it_skips(tmp_path: Path) -> None:
    optimizer = {"call": "torch.optim:SGD", "lr": 1e30}
    (outcome,) = run_on(None, tmp_path, "skip", {"optimizer": optimizer, "train": {"epochs": 20}})
    assert f"for {MOST_SKIPPED_STEPS} steps in a row" in outcome.error
    assert outcome.steps < 40


# ---- checkpoints


def test_a_mask_of_infinities_does_not_keep_a_run_from_saving(pool: RankPool | None, tmp_path: Path) -> None:
    model = {"call": "tests.train.runs.test_nonfinite:Masked", "hidden": 8}
    for outcome in run_on(pool, tmp_path, "skip", {"model": model, **PROBLEMS["nan"]}):
        assert (outcome.error, outcome.saved, outcome.skipped) == ("", [8, 10], 2)


def test_a_stopped_run_does_not_save_weights_that_are_not_finite(
    pool: RankPool | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = BAD_STEPS[0]
    arguments = (tmp_path, "stop", {**PROBLEMS["nan"], "checkpoint": {"every_steps": bad - 1}})
    outcomes = [run(0, 1, *arguments, stop_after=bad)] if pool is None else pool.run(stopped_run, *arguments, bad)
    for outcome in outcomes:
        assert outcome.steps == bad + (pool is not None)  # several ranks stop after the step that follows
        assert outcome.saved == [bad - 1]
    if pool is None:
        printed = capsys.readouterr().err
        assert f"step {bad}: the loss is nan: the run ends after 3 such steps in a row\n" in printed
        assert f"step {bad} is not saved: layers.0.weight is not finite\n" in printed
        assert f"stopped after step {bad}, which is not saved, because its weights or its" in printed
        assert f"the newest one saved is {bad - 1}\n" in printed


def stopped_run(rank: int, size: int, folder: Path, on_nonfinite: str, sections: Any, stop_after: int) -> Outcome:
    return run(rank, size, folder, on_nonfinite, sections, stop_after=stop_after)


def test_weights_that_are_not_finite_are_never_the_best(tmp_path: Path) -> None:
    """The metric gets better in every evaluation, also in those with NaN weights."""
    job = toy_job(
        data={**PROBLEMS["nan"]["data"], "eval": EVALUATED["data"]["eval"]},
        metrics={"constant": {"call": "tests.train.runs.test_nonfinite:constant"}},
        log={"eval_every_steps": 1},
        checkpoint={"best": "constant", "better": "lower"},
    )
    trainer = make_trainer(job, tmp_path)
    with pytest.raises(TrainingDiverged):
        trainer.run(StopRequest())
    assert trainer.best is not None
    assert trainer.best.step == BAD_STEPS[0] - 1
    assert (trainer.folder.checkpoints / "best").resolve().name == f"step-{BAD_STEPS[0] - 1:08d}"


CALLS = [0]


def constant(output: Tensor, target: Tensor) -> tuple[float, int]:
    """A metric that is lower in every evaluation."""
    CALLS[0] -= 1
    return float(CALLS[0]), 1
