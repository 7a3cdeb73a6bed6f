"""`train.on_spike`: a batch whose loss is far above those before it is left out, or ends the run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.data.order import permutation
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.train.check import check_job
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.train.one_process import BATCH, equal_states, make_trainer, session_of, toy_job, train
from tests.train.runs.test_nonfinite import MARK, SCHEDULE, SEED, Outcome, data, planted, run
from tests.train.test_check import TWO
from tests.train.toy import Net

BATCHES, BAD = 20, 14  # the batch of this index, and so step 15, has a planted sample
SIZE = BATCHES * BATCH
PLANTED: dict[str, Any] = {"size": SIZE, "value": MARK, "indices": [int(permutation(SEED, 0, SIZE)[BAD * BATCH])]}


def sections(on_spike: str) -> dict[str, Any]:
    settings = {"on_spike": on_spike, "epochs": 1, "spike": {"window": 12, "deviations": 8}}
    model = {"call": "tests.train.runs.test_spikes:Spiky", "hidden": 8}
    return {"data": data(**PLANTED), "train": settings, "model": model}


class Spiky(Net):
    """The toy's model. Its outputs are wrong by far in a batch that has the planted sample."""

    def forward(self, x: Tensor) -> Tensor:
        marked = x[:, 0] == MARK
        output = super().forward(torch.where(marked.unsqueeze(1), 0.0, x))
        return torch.where(marked.any(), 1000 * output, output)


def spiked(rank: int, size: int, folder: Path, on_spike: str) -> Outcome:
    return run(rank, size, folder, "stop", sections(on_spike))


def without_bad_batch(rank: int, size: int, folder: Path) -> Any:
    session = session_of(make_trainer(toy_job(schedule=SCHEDULE, **sections("ignore")), folder, rank, size))
    for batch in session.batches(planted(**PLANTED), 1, BATCH):
        session.leave_out(batch) if batch.index == BAD else session.step(batch)
    return session.state_dict(), session.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("on_spike", all_but({"rewind"}, ["skip", "rewind"]))
def test_the_batch_of_a_spike_is_left_out(two: RankPool, tmp_path: Path, on_spike: str) -> None:
    expected = two.run(without_bad_batch, tmp_path / "reference")
    for outcome, (state, rate) in zip(two.run(spiked, tmp_path / "run", on_spike), expected, strict=True):
        assert not outcome.error
        assert (outcome.steps, outcome.skipped, outcome.rate) == (BATCHES, 1, rate)
        assert equal_states(outcome.state, state)
        assert [line["step"] for line in outcome.log if line["kind"] == "skipped"] == [BAD + 1]
        assert outcome.about["left_out"] == ([[0, BAD]] if on_spike == "rewind" else [])
        assert len(outcome.about["losses"]) == 12


def test_a_run_stops_at_a_spike_and_keeps_its_checkpoint(tmp_path: Path) -> None:
    outcome = spiked(0, 1, tmp_path, "stop")
    assert outcome.error.startswith(f"step {BAD + 1}: the loss is ")
    assert "train.on_spike is stop" in outcome.error
    assert (outcome.steps, outcome.result, outcome.saved) == (BAD + 1, None, [BAD - 2, BAD])


def test_spikes_are_told_and_ignored_without_the_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(toy_job(**sections("skip")), tmp_path / "skip")
    printed = capsys.readouterr().err
    assert "deviations of" in printed
    assert "its update is left out (1 so far)" in printed
    train(toy_job(**sections("ignore")), tmp_path / "ignore")
    assert "deviations of" not in capsys.readouterr().err


def test_a_resumed_run_decides_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    job = toy_job(**sections("skip"))
    whole = train(job, tmp_path / "whole")
    train(job, tmp_path / "stopped", stop_after=BAD - 1)  # without its last losses, the run could not see the spike
    resumed = train(job, tmp_path / "stopped")
    assert resumed.session.skipped_steps == whole.session.skipped_steps == 1
    assert equal_states(session_of(resumed).state_dict(), session_of(whole).state_dict())


def test_servers_refuse_it() -> None:
    plan = Plan.model_validate({"axes": {"replicate": 2}, "gradients": {"servers": 1}})
    with pytest.raises(InputError, match=r"train.on_spike is skip, but workers of parameter servers do not know"):
        check_job(toy_job(train={"on_spike": "skip"}), plan, TWO)
