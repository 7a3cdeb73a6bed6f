"""Strategies train the same batches in alternating rounds, their losses are checked, and those that a job cannot be
trained with are named."""

import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import nn

from meshwright.bench.strategies import compare as compare_module
from meshwright.bench.strategies.compare import Settings, _note, choose_steps, compare
from meshwright.bench.strategies.machines import is_local, machines_of_ranks
from meshwright.bench.strategies.measure import Measurement, RunnableStrategy, Steps
from meshwright.bench.strategies.rows import StrategyReport
from meshwright.bench.strategies.show import show
from meshwright.errors import InputError, RankError, Stopped
from meshwright.job import Job, parse_job
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.processes.local.fork_server import preloaded
from tests.bench.strategies.test_plans import cluster_of
from tests.train.toy import Net

CLUSTERS = {1: cluster_of(1), 2: cluster_of(2)}


def _job(**train: Any) -> Job:
    return parse_job(
        {
            "model": {"call": "torch.nn:Linear", "in_features": 20, "out_features": 5},
            "data": {"train": {"call": "tests.train.toy:points"}},
            "loss": {"call": "torch.nn.functional:cross_entropy"},
            "optimizer": {"call": "torch.optim:SGD", "lr": 0.1},
            "train": {"epochs": 1, "global_batch": 30, **train},
        }
    )


def _settings(*names: str, rounds: int = 1, steps: int | None = 2, limit_s: float = 1e9) -> Settings:
    return Settings(("single device", *names), ("fp32",), steps, rounds, limit_s)


def _text(report: StrategyReport, width: int) -> str:
    file = io.StringIO()
    show(report, Console(file=file, width=width))
    return file.getvalue()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The plans that were measured, in their order. Two ranks are twice as fast; asynchronous updates change the
    loss."""
    names: list[str] = []

    def measure(strategy: RunnableStrategy, job: Job, steps: Steps, folder: Path) -> Measurement:
        if strategy.plan.axes.shard > 1:
            raise RankError("rank 1 ran out of memory")
        if folder.name != "probe":
            names.append(f"{strategy.loop}: {strategy.plan.summary()}")
        loss = 0.5 if strategy.plan.gradients.updates == "synchronous" else 0.6
        step_s = 1.0 / strategy.plan.world_size
        return Measurement(step_s, loss, 8.0, None, 5)

    monkeypatch.setattr(RunnableStrategy, "measure", measure)
    return names


def test_rounds_alternate_and_losses_are_compared(ran: list[str]) -> None:
    names = ("plain loop", "replicate ring", "servers asynchronous", "shard parameters", "tensor")
    report = compare(_job(), CLUSTERS, _settings(*names, rounds=2))
    one_round = [
        "session: one rank · fp32",
        "plain: one rank · fp32",
        "session: replicate 2 · fp32 · ring",
        "servers: replicate 2 · fp32 · 1 asynchronous servers",
    ]
    assert ran == one_round + one_round[::-1]
    rows = {row.strategy: row for row in report.rows}
    ring, servers = rows["replicate ring"], rows["servers asynchronous"]
    assert (ring.speedup, ring.efficiency, ring.samples_per_s, ring.rounds) == (2.0, 1.0, 60.0, 2)
    assert (ring.loss_difference, ring.loss_agrees) == (0.0, True)
    assert servers.loss_difference == pytest.approx(0.2)
    assert servers.loss_agrees is False
    skipped = {strategy.strategy: strategy.reason for strategy in report.skipped}
    assert skipped["shard parameters"] == "rank 1 ran out of memory"
    assert "no layers that can be split" in skipped["tensor"]
    summary = report.to_json()["summary"]
    assert summary["fastest"]["strategy"] == "replicate ring"  # the servers are as fast, but train another model
    assert len(summary["losses_differ"]) == 1


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_fits_and_breaks_no_word(ran: list[str], width: int) -> None:
    names = ("replicate halving_doubling", "servers asynchronous", "shard parameters")
    text = _text(compare(_job(), CLUSTERS, _settings(*names)), width)
    assert max(map(len, text.splitlines())) <= width
    for words in ("efficiency", "communicating", "asynchronous", "by design", "ran out of memory"):
        assert words in " ".join(text.split())


def test_the_number_of_steps_follows_from_their_time() -> None:
    choose = partial(choose_steps, start_up_s=1.0, allowed_s=10.0, device="cpu")
    assert choose(None, step_s=0.01) == Steps(2, 20, 10)
    assert choose(None, step_s=0.4) == Steps(1, 2, 1)
    assert choose(None, step_s=3.0) == Steps(1, 1, 0, records_timed=True)
    assert choose(7, step_s=3.0) == Steps(1, 7, 3)


def test_cuda_graphs_are_captured_before_the_timed_steps() -> None:
    assert choose_steps(None, step_s=0.001, start_up_s=1.0, allowed_s=10.0, device="cuda") == Steps(5, 50, 25)


def test_on_one_device_the_automatic_plan_is_compared_with_it(ran: list[str]) -> None:
    report = compare(_job(), {1: cluster_of(1)}, _settings("replicate ring", "auto"))
    assert [row.strategy for row in report.rows] == ["single device", "auto"]
    assert report.skipped[0].reason == "it needs several devices, but the cluster has one"


def test_strategies_that_are_not_run_for_the_same_reason_are_one_line(ran: list[str]) -> None:
    settings = replace(_settings("replicate ring", "replicate tree"), precisions=("fp32", "bf16"))
    text = _text(compare(_job(), {1: cluster_of(1)}, settings), 100)
    assert text.count("it needs several devices") == 1
    assert "replicate ring, replicate tree" in text


def test_no_round_begins_that_would_end_too_late(ran: list[str]) -> None:
    report = compare(_job(), CLUSTERS, _settings("replicate ring", rounds=5, limit_s=0.0))
    assert [row.rounds for row in report.rows] == [1, 1]


def test_what_the_batch_does_not_allow_is_skipped(ran: list[str]) -> None:
    report = compare(_job(global_batch=1), CLUSTERS, _settings("replicate ring"))
    assert report.skipped[0].reason.startswith("train.global_batch is 1, smaller than 2 data-parallel ranks")


def test_a_mistake_in_the_job_is_no_reason_to_skip(ran: list[str]) -> None:
    with pytest.raises(InputError, match=r"train\.freeze: 'head\.\*' matches no parameter"):
        compare(_job(freeze=["head.*"]), CLUSTERS, _settings("replicate ring"))
    assert ran == []


def test_what_changes_the_loss_by_design_is_named() -> None:
    divided, net = Plan(axes=Axes(replicate=2)), Net()
    assert "BatchNorm" in (_note(divided, "session", net) or "")
    assert "dropout" in (_note(divided, "session", nn.Dropout(0.1)) or "")
    assert _note(Plan(), "session", net) is None
    assert _note(divided, "session", nn.Linear(2, 2)) is None


def test_a_stop_request_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any) -> None:
        raise Stopped("stopped by SIGINT")

    monkeypatch.setattr(compare_module.RunnableStrategy, "measure", stopped)
    with pytest.raises(Stopped):
        compare(_job(), CLUSTERS, _settings("replicate ring"))


def test_on_other_machines_strategies_are_predicted() -> None:
    machines = machines_of_ranks("8xV100-16GB", "1,4,8")
    assert not is_local(machines)
    settings = _settings("DataParallel", "replicate native")
    report = compare(_job(global_batch=32), machines, settings, only_predict=True)
    assert [(row.strategy, row.ranks) for row in report.rows] == [
        ("single device", 1),
        *((name, ranks) for ranks in (4, 8) for name in ("DataParallel", "replicate native")),
    ]
    assert all(row.predicted_step_s and row.measured_step_s is None for row in report.rows)
    by_name = {(row.strategy, row.ranks): row.predicted_step_s or 0.0 for row in report.rows}
    assert by_name["DataParallel", 8] > by_name["DataParallel", 4]  # more copies of the model, and nothing to compute
    assert "predicted" in _text(report, 80)


def test_ranks_are_measured() -> None:
    names = ("DataParallel", "replicate ring", "servers synchronous")
    with preloaded("meshwright.bench.strategies.rank"):
        report = compare(_job(), CLUSTERS, _settings(*names))
    assert report.skipped == ()
    rows = {row.strategy: row for row in report.rows}
    assert set(rows) == {"single device", *names}
    assert all(row.loss_agrees and row.measured_step_s for row in report.rows), report.rows
    sent = {name: row.exchanged_bytes for name, row in rows.items()}
    assert sent["single device"] == sent["DataParallel"] == 0
    assert sent["replicate ring"]
    assert sent["servers synchronous"]
