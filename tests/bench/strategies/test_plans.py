"""Every strategy has a plan, or a reason why there is none."""

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.bench.strategies.catalog import (
    ALGORITHMS,
    ALL_CORES,
    AUTO,
    DATA_PARALLEL,
    HYBRID,
    SCHEDULES,
    SHARDING_LEVELS,
    SINGLE,
    STRATEGIES,
    selected_strategies,
)
from meshwright.bench.strategies.machines import machines_of_ranks, parse_precisions
from meshwright.bench.strategies.plans import strategy_plan
from meshwright.cluster.catalog import find_link
from meshwright.cluster.cluster import Cluster, Device, Node
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.profile.optimizer import optimizer_cost
from meshwright.workloads.mnist import Net

LOSS = nn.functional.cross_entropy


def cluster_of(devices: int) -> Cluster:
    device = Device(
        name="core", kind="cpu", memory_bytes=2**32, bandwidth_bytes_per_s=1e10, rates={"fp32": 1e11}, sources={}
    )
    node = Node(device=device, count=devices, link=find_link("Loopback"), cores=1)
    return Cluster(name=f"{devices}xcpu", nodes=(node,), based_on="measured")


def _plans(strategies: tuple[str, ...], devices: int, model: nn.Module, sample: Any, batch: int = 128) -> list[Plan]:
    profiles = Profiles(model, sample, LOSS, None, on_gpu=False)
    inputs = PlanningInputs(cluster_of(devices), batch, optimizer_cost(None, False), allow="same")
    return [strategy_plan(strategy, devices, lambda: (inputs, profiles)) for strategy in strategies]


def _digits() -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        return Net(), (torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.long))


def test_each_strategy_is_one_axis_over_all_devices_with_its_own_choice() -> None:
    names = tuple(name for name in STRATEGIES if name not in (DATA_PARALLEL, ALL_CORES, HYBRID, AUTO))
    plans = dict(zip(names, _plans(names, 2, *_digits()), strict=True))
    assert plans[SINGLE] == Plan()
    assert {plans[f"replicate {name}"].gradients.algorithm for name in ALGORITHMS} == set(ALGORITHMS)
    assert {plans[f"shard {level}"].memory.sharding for level in SHARDING_LEVELS} == set(SHARDING_LEVELS)
    assert plans["servers asynchronous"].gradients.servers == 1
    assert plans["tensor"].axes == Axes(tensor=2)
    for schedule in SCHEDULES:
        pipeline = plans[f"pipeline {schedule}"].pipeline
        stages = 2 * plans[f"pipeline {schedule}"].stages_per_rank
        assert (pipeline.schedule, len(pipeline.cuts), pipeline.microbatches) == (schedule, stages - 1, 2 * stages)


def test_microbatches_are_no_more_than_samples() -> None:
    (plan,) = _plans(("pipeline 1f1b",), 2, *_digits(), batch=3)
    assert plan.pipeline.microbatches == 3


def test_a_model_that_cannot_be_divided_gets_a_reason() -> None:
    model, sample = nn.Linear(4, 3), (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
    for strategy, devices, words in (
        ("tensor", 2, "no layers that can be split along the tensor axis"),
        ("pipeline gpipe", 2, "too few for 2 stages"),
        ("shard parameters", 1, "the cluster has one"),
    ):
        with pytest.raises(InputError, match=words):
            _plans((strategy,), devices, model, sample)


def test_strategies_are_chosen_by_name_and_by_kind() -> None:
    assert selected_strategies(None) == STRATEGIES
    assert selected_strategies("shard, DataParallel") == (SINGLE, DATA_PARALLEL, *STRATEGIES[12:15])
    assert selected_strategies("DataParallel,pipeline zbv") == (SINGLE, DATA_PARALLEL, "pipeline zbv")
    with pytest.raises(InputError, match="no strategy 'tensors': did you mean 'tensor'"):
        selected_strategies("replicate,tensors")


def test_precisions_and_numbers_of_devices_are_checked() -> None:
    assert parse_precisions("fp32, bf16") == ("fp32", "bf16")
    with pytest.raises(InputError, match="no precision 'fp31'"):
        parse_precisions("fp31")
    machines = machines_of_ranks("2x8xA100-80GB", "4,16")
    assert {count: cluster.device_count for count, cluster in machines.items()} == {1: 1, 4: 4, 16: 16}
    for ranks, words in (("12", "choose at most 8, or 16"), ("two", "write numbers"), ("0", "not between 1")):
        with pytest.raises(InputError, match=words):
            machines_of_ranks("2x8xA100-80GB", ranks)
