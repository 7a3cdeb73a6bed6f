"""`train.on_nonfinite: rewind`: a run goes back to its newest checkpoint, and leaves out the batch that was not
finite."""

from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.train.check import check_job
from meshwright.train.step.divergence import MOST_REWINDS
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.train.one_process import equal_states, toy_job, train
from tests.train.runs.test_nonfinite import (
    BAD_STEPS,
    EVERY_SAMPLE,
    PROBLEMS,
    STEPS,
    bad_batch,
    run,
    run_on,
    without_bad_batches,
)
from tests.train.test_check import TWO


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def pool(request: pytest.FixtureRequest) -> RankPool | None:
    value: RankPool | None = None if request.param == 1 else request.getfixturevalue("two")
    return value


def test_a_run_goes_back_and_leaves_out_the_bad_batch(pool: RankPool | None, tmp_path: Path) -> None:
    outcomes = run_on(pool, tmp_path / "run", "rewind", PROBLEMS["nan"])
    arguments: tuple[Path, dict[str, Any]] = (tmp_path / "reference", {})
    expected = [without_bad_batches(0, 1, *arguments)] if pool is None else pool.run(without_bad_batches, *arguments)
    for outcome, (state, rate) in zip(outcomes, expected, strict=True):
        assert not outcome.error
        assert (outcome.steps, outcome.skipped, outcome.rate) == (STEPS, 2, rate)
        assert equal_states(outcome.state, state)
        assert [tuple(pair) for pair in outcome.about["left_out"]] == [bad_batch(0), bad_batch(1)]
        assert outcome.result is not None
        assert outcome.result["skipped_steps"] == 2
        assert [line["step"] for line in outcome.log] == list(range(1, STEPS + 1)), "repeated steps are logged once"
        assert [line["step"] for line in outcome.log if line["kind"] == "skipped"] == BAD_STEPS


PLANS: dict[str, dict[str, Any]] = {
    "shard": {"axes": {"shard": 2}},
    "tensor": {"axes": {"tensor": 2}},
    "pipeline": {"axes": {"pipeline": 2}, "pipeline": {"cuts": ["layers.3"], "microbatches": 2}},
    "fp16": {"axes": {"replicate": 2}, "numerics": {"precision": "fp16"}},
}


@pytest.mark.parametrize("plan", all_but({"shard"}, PLANS))
def test_a_run_goes_back_under_every_plan(two: RankPool, tmp_path: Path, plan: str) -> None:
    outcomes = two.run(run, tmp_path / "run", "rewind", {**PROBLEMS["nan"], "plan": PLANS[plan]})
    expected = two.run(without_bad_batches, tmp_path / "reference", {"plan": PLANS[plan]})
    for outcome, (state, rate) in zip(outcomes, expected, strict=True):
        assert (outcome.error, outcome.steps, outcome.skipped, outcome.rate) == ("", STEPS, 2, rate)
        assert equal_states(outcome.state, state)


def test_rewinding_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(toy_job(train={"on_nonfinite": "rewind"}, **PROBLEMS["gradient"]), tmp_path)
    printed = capsys.readouterr().err
    step, (_, index) = BAD_STEPS[0], bad_batch(0)
    left_out = f"batch {index} of epoch 0 is left out"
    assert f"step {step}: a gradient is not finite: going back to step 0; {left_out} from now on\n" in printed
    assert f"step {step}: {left_out}\n" in printed


def test_left_out_batches_stay_left_out_under_another_plan(two: RankPool, tmp_path: Path) -> None:
    """One rank saves after its second rewind; two ranks that would stop at the first NaN resume to the end."""
    run(0, 1, tmp_path, "rewind", {**PROBLEMS["nan"], "train": {"epochs": 3}}, stop_after=STEPS)
    for outcome in two.run(run, tmp_path, "stop", PROBLEMS["nan"]):
        assert (outcome.error, outcome.steps, outcome.skipped) == ("", STEPS, 2)


def test_left_out_batches_stay_left_out_after_a_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = toy_job(train={"on_nonfinite": "rewind"}, checkpoint={"every_steps": 3}, **PROBLEMS["nan"])
    train(job, tmp_path, stop_after=BAD_STEPS[0])
    first = capsys.readouterr().err
    assert f"step {BAD_STEPS[0]}: batch {bad_batch(0)[1]} of epoch 0 is left out\n" in first
    resumed = train(job, tmp_path)
    assert "going back to step 0;" not in capsys.readouterr().err
    assert resumed.left_out == {bad_batch(0), bad_batch(1)}
    assert resumed.session.skipped_steps == 2


def test_a_run_that_only_rewinds_ends(pool: RankPool | None, tmp_path: Path) -> None:
    for outcome in run_on(pool, tmp_path, "rewind", {**EVERY_SAMPLE, "train": {"epochs": 4}}):
        # Batches that are left out count as steps, so that checkpoints come between the rewinds.
        assert "the updates of all 20 steps were left out" in outcome.error


def test_a_run_that_rewinds_without_reaching_a_checkpoint_ends(pool: RankPool | None, tmp_path: Path) -> None:
    sections = {**EVERY_SAMPLE, "train": {"epochs": 4}, "checkpoint": {"every_steps": None}}
    for outcome in run_on(pool, tmp_path, "rewind", sections):
        assert f"went back to its newest checkpoint {MOST_REWINDS} times without reaching the next one" in outcome.error
        assert outcome.saved == [0]


def test_servers_cannot_go_back() -> None:
    plan = Plan.model_validate({"axes": {"replicate": 2}, "gradients": {"servers": 1}})
    with pytest.raises(InputError, match="on_nonfinite is rewind, but workers of parameter servers cannot go back"):
        check_job(toy_job(train={"on_nonfinite": "rewind"}), plan, TWO)
