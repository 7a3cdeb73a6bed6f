"""`best_plan` without a cluster plans for the ranks that there are, and all ranks get the same plan."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright.auto import choose
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.names import cluster_from_name
from meshwright.errors import InputError
from meshwright.plan import Plan
from tests.ranks import RankPool


def machine(name: str, _: Any) -> Cluster:
    """Known devices instead of this machine, which would have to be measured."""
    return cluster_from_name(name.replace("cpu", "H100"))


def best_plan(global_batch: int = 16, **options: Any) -> Plan:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    sample = (torch.randn(4, 6), torch.randint(0, 3, (4,)))
    with patch.object(choose, "find_cluster", machine):
        return mw.best_plan(
            model, sample, loss=F.cross_entropy, global_batch=global_batch, allow="same", device="cpu", **options
        )


def test_alone_the_plan_is_for_one_rank() -> None:
    plan = best_plan()
    assert plan.world_size == 1
    model = nn.Linear(6, 3)
    mw.parallelize(model, torch.optim.SGD(model.parameters()), plan=plan, loss=F.cross_entropy, device="cpu")


def plan_on_ranks(rank: int, size: int, global_batch: int) -> tuple[Plan, float]:
    """Each rank would find another plan."""

    def search(inputs: Any, profiles: Any) -> Any:
        torch.rand(())
        plan = choose_plan(inputs, profiles).plan
        memory = plan.memory.model_copy(update={"accumulation": rank + 1})
        return SimpleNamespace(plan=plan.model_copy(update={"memory": memory}))

    choose_plan = choose.choose_plan
    with patch.object(choose, "choose_plan", search):
        plan = best_plan(global_batch)
    return plan, float(torch.rand(()))


@pytest.mark.parametrize("global_batch", [16, 9])
def test_all_ranks_get_the_plan_of_rank_0_for_all_of_them(three: RankPool, global_batch: int) -> None:
    results = three.run(plan_on_ranks, global_batch)
    plans, numbers = zip(*results, strict=True)
    assert plans[0].world_size == 3
    assert plans[0].memory.accumulation == 1
    assert all(plan == plans[0] for plan in plans)
    assert len(set(numbers)) == 1, "ranks that are seeded alike stay alike"


def no_plan(rank: int, size: int) -> str:
    def search(*_: Any) -> Any:
        assert rank == 0, "only rank 0 searches"
        raise InputError("nothing fits")

    with patch.object(choose, "choose_plan", search), pytest.raises(InputError) as error:
        best_plan()
    return str(error.value)


def test_if_rank_0_finds_no_plan_every_rank_says_so(two: RankPool) -> None:
    first, second = two.run(no_plan)
    assert first == "nothing fits"
    assert second.startswith("rank 0 has found no plan: nothing fits")


def test_ranks_on_several_machines_have_to_be_described(monkeypatch: pytest.MonkeyPatch) -> None:
    world = choose.World(0, 0, 4, 2, 0, torch.device("cpu"), None)
    monkeypatch.setattr(choose, "join", lambda *_: world)
    monkeypatch.setattr(choose, "broadcast_value", lambda value: value)
    with pytest.raises(InputError, match=r"the 4 ranks are on 2 machines, whose network is not known: describe them"):
        best_plan()


@pytest.mark.parametrize("given", ["dict", "path", "plan"])
def test_a_plan_may_be_given_in_three_ways(tmp_path: Any, given: str) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("memory: {accumulation: 2}")
    groups = {"memory": {"accumulation": 2}}
    model = nn.Linear(6, 3)
    session = mw.parallelize(
        model,
        torch.optim.SGD(model.parameters()),
        plan={"dict": groups, "path": str(file), "plan": Plan.model_validate(groups)}[given],
        loss=F.cross_entropy,
        device="cpu",
    )
    assert session.plan == Plan.model_validate(groups)


def test_a_plan_for_other_ranks_says_what_to_do() -> None:
    model = nn.Linear(6, 3)
    message = r"is for 2 ranks, but there are 1: start 2 ranks \(torchrun --nproc-per-node 2\), or use a plan for 1"
    with pytest.raises(InputError, match=message):
        mw.parallelize(model, torch.optim.SGD(model.parameters()), plan={"axes": {"replicate": 2}}, device="cpu")


def test_a_misspelled_field_of_a_plan_is_named() -> None:
    model = nn.Linear(6, 3)
    with pytest.raises(InputError, match="replicat"):
        mw.parallelize(model, torch.optim.SGD(model.parameters()), plan={"axes": {"replicat": 1}}, device="cpu")
