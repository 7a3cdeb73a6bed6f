"""Strategies are compared in alternating rounds, and those that a job cannot be trained with are named."""

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.bench import strategies
from meshwright.bench.strategies import (
    REFERENCE,
    STRATEGIES,
    SkippedStrategy,
    compare,
    report_lines,
    selected_strategies,
)
from meshwright.bench.strategy_plans import one_axis_plan
from meshwright.cluster.catalog import find_link
from meshwright.cluster.cluster import Cluster, Device, Node
from meshwright.errors import InputError, RankError, Stopped
from meshwright.job import Job, parse_job
from meshwright.plan import Axes, Plan
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.profile.optimizer import optimizer_cost
from meshwright.train.job_parts import JobParts
from meshwright.workloads.mnist import Net

LOSS = nn.functional.cross_entropy


def _job(**train: Any) -> Job:
    return parse_job(
        {
            "model": {"call": "tests.train.toy:Net"},
            "data": {"train": {"call": "tests.train.toy:points"}},
            "loss": {"call": "torch.nn.functional:cross_entropy"},
            "optimizer": {"call": "torch.optim:SGD", "lr": 0.1},
            "train": {"epochs": 1, "global_batch": 30, **train},
        }
    )


def _cluster(devices: int) -> Cluster:
    device = Device(
        name="core", kind="cpu", memory_bytes=2**32, bandwidth_bytes_per_s=1e10, rates={"fp32": 1e11}, sources={}
    )
    node = Node(device=device, count=devices, link=find_link("Loopback"), cores=1)
    return Cluster(name=f"{devices}xcpu", nodes=(node,), based_on="measured")


def _plan(strategy: str, devices: int, model: nn.Module, sample: Any, batch: int = 128) -> Plan:
    profiles = Profiles(model, sample, LOSS, None, on_gpu=False)
    inputs = PlanningInputs(_cluster(devices), batch, optimizer_cost(None, False), allow="same")
    return one_axis_plan(strategy, devices, lambda: (inputs, profiles))


def _digits() -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        return Net(), (torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.long))


def test_each_strategy_is_one_axis_over_all_devices() -> None:
    found = {name: _plan(name, 2, *_digits()) for name in STRATEGIES if name not in ("threads", "auto")}
    axes = {name: Axes(**({} if name == "one rank" else {name: 2})) for name in found}
    assert {name: plan.axes for name, plan in found.items()} == axes
    assert found["pipeline"].pipeline.microbatches == 4
    assert len(found["pipeline"].pipeline.cuts) == 1


def test_microbatches_are_no_more_than_samples() -> None:
    assert _plan("pipeline", 2, *_digits(), batch=3).pipeline.microbatches == 3


def test_a_model_that_cannot_be_divided_gets_a_reason() -> None:
    model, sample = nn.Linear(4, 3), (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(InputError, match="no layers that can be split along the tensor axis"):
        _plan("tensor", 2, model, sample)
    with pytest.raises(InputError, match="too few for 2 stages"):
        _plan("pipeline", 2, model, sample)
    with pytest.raises(InputError, match="the cluster has one"):
        _plan("shard", 1, model, sample)


def test_strategies_are_chosen_by_name() -> None:
    assert selected_strategies(None) == STRATEGIES
    assert selected_strategies("replicate, threads") == ("threads", "replicate")
    with pytest.raises(InputError, match="no strategy 'tensors': did you mean 'tensor'"):
        selected_strategies("replicate,tensors")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured, in its order: a strategy's rate grows with each round."""
    names: list[str] = []

    def measured(name: str) -> float:
        names.append(name)
        return 100.0 * names.count(name)

    def train(_: Job, plan: Plan, *__: Any, **___: Any) -> dict[str, float]:
        if plan.axes.shard > 1:
            raise RankError("rank 1 ran out of memory")
        return {"samples_per_s": 2 * measured(plan.summary())}

    monkeypatch.setattr(strategies, "train", train)
    monkeypatch.setattr(strategies, "_run_loop", lambda module, *_: measured(module.rpartition(".")[2]))
    return names


def _axis(name: str, _: JobParts) -> Plan:
    if name == "tensor":
        raise InputError("nothing to split")
    return Plan(axes=Axes(**({} if name == "one rank" else {name: 2})))


def test_rounds_alternate_and_medians_are_reported(ran: list[str]) -> None:
    rows, skipped = compare(
        _job(), _cluster(2), selected_strategies("one rank,threads,replicate,shard,tensor"), _axis, 2, 3
    )
    assert ran == ["bare", "one rank · fp32", "threads", "replicate 2 · fp32"] * 3
    assert [row.strategy for row in rows] == [REFERENCE, "one rank", "threads", "replicate"]
    assert [row.ratio for row in rows] == [1.0, 2.0, 1.0, 2.0]
    assert all(row.spread == 1.0 and row.rounds == 3 for row in rows)
    assert skipped == [
        SkippedStrategy("tensor", "nothing to split"),
        SkippedStrategy("shard", "rank 1 ran out of memory"),
    ]
    assert report_lines(rows, skipped)[-1].split(maxsplit=1) == ["shard", "not run: rank 1 ran out of memory"]


def test_what_the_batch_does_not_allow_is_skipped(ran: list[str]) -> None:
    _, skipped = compare(_job(global_batch=1), _cluster(2), ("replicate",), _axis, 2, 1)
    assert skipped[0].reason.startswith("train.global_batch is 1, smaller than 2 data-parallel ranks")
    assert ran == ["bare"]


def test_one_device_has_no_threads_to_share_it(ran: list[str]) -> None:
    _, skipped = compare(_job(), _cluster(1), ("threads",), _axis, 2, 1)
    assert skipped == [SkippedStrategy("threads", "threads needs several devices, but the cluster has one")]


def test_a_mistake_in_the_job_is_no_reason_to_skip(ran: list[str]) -> None:
    with pytest.raises(InputError, match=r"train\.freeze: 'head\.\*' matches no parameter"):
        compare(_job(freeze=["head.*"]), _cluster(2), ("replicate",), _axis, 2, 1)
    assert ran == []


def test_a_stop_request_ends_the_benchmark(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise Stopped("stopped by SIGINT")

    monkeypatch.setattr(strategies, "train", stopped)
    with pytest.raises(Stopped):
        compare(_job(), _cluster(2), ("replicate",), _axis, 2, 1)


@pytest.mark.soak
def test_loops_and_ranks_are_measured() -> None:
    rows, skipped = compare(_job(), _cluster(2), ("threads", "replicate"), _axis, 2, 1)
    assert [row.strategy for row in rows] == [REFERENCE, "threads", "replicate"]
    assert all(row.samples_per_s > 0 for row in rows)
    assert skipped == []
