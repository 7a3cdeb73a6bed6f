"""Branches are placed on different ranks where that is predicted to be faster, and only where it can be run."""

from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from meshwright.cluster.detect import find_cluster
from meshwright.parallel.check import plan_checker
from meshwright.plan import Plan
from meshwright.planner.bounds import BoundCalculator
from meshwright.planner.branch_placement import assign_ranks, find_branch_groups, shared_layer_splits
from meshwright.planner.candidates import AxisSizes, candidate_series
from meshwright.planner.explanation.explain import explain
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.model_summary import BranchGroup
from meshwright.planner.polish import neighbours
from meshwright.planner.profiles import Profiles
from meshwright.planner.search_result import PricedPlan, SearchResult
from meshwright.planner.summarize import summarize_model
from meshwright.proof.prove import prove_in_running_ranks
from meshwright.proof.request import ProofRequest, UserModel
from meshwright.workloads.in_batch import InBatchSoftmax
from meshwright.workloads.multitask import Multitask, MultitaskLoss
from meshwright.workloads.towers import TwoTowers
from tests.planner.cases import ADAMW, search_plans
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.train.one_process import world
from tests.zoo import BATCH, ZOO, RandomSamples

NODES = "2x8xA100-80GB"
KINDS: tuple[dict[str, Any], ...] = (
    {"kind": "classification", "classes": 4},
    {"kind": "regression"},
    {"kind": "similarity"},
    {"kind": "ranking"},
)


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are compared as they run uncompiled: plans with a tensor axis, which placement needs, are not compiled."""
    eager = {"compile": "none", "cuda_graphs": False}
    monkeypatch.setattr(neighbours, "compilations", lambda *_, **__: [eager])


@cache
def towers(vocabulary: int = 100_000) -> Profiles:
    """The model of jobs/two_tower.yaml."""
    with torch.device("meta"):
        model = TwoTowers(vocabulary)
        query, document = torch.empty(4, 16, dtype=torch.long), torch.empty(4, 128, dtype=torch.long)
    return Profiles(model, (query, document, torch.empty(4, dtype=torch.long)), InBatchSoftmax())


@cache
def tasks(count: int = 8, layers: int = 2) -> Profiles:
    """The tasks of jobs/multitask.yaml, each twice, on a shorter encoder."""
    named: dict[str, Any] = {f"task{number}": KINDS[number % len(KINDS)] for number in range(count)}
    with torch.device("meta"):
        model = Multitask(named, layers=layers)
        batch = torch.empty(4, 3, 128, dtype=torch.long), torch.empty(4, 2)
    return Profiles(model, batch, MultitaskLoss(named))


@cache
def search_for(kind: str, batch: int) -> tuple[PlanningInputs, SearchResult]:
    return search_plans(NODES, towers() if kind == "towers" else tasks(), batch)


def best_of(result: SearchResult, *, placed: bool) -> PricedPlan:
    plans = [
        priced for priced in (*result.ranked, *result.family_bests) if bool(priced.plan.modules.branches) == placed
    ]
    return min(plans, key=lambda priced: priced.prediction.step_s)


def step_times(result: SearchResult) -> tuple[float, float]:
    """The best step with branches placed, and without."""
    with_branches, without = (best_of(result, placed=placed).prediction.step_s for placed in (True, False))
    return with_branches, without


# ---- which plan is best


def test_towers_are_placed_where_their_weights_take_longer_than_their_samples() -> None:
    inputs, result = search_for("towers", 4096)
    best = result.ranked[0]
    assert best.plan.modules.branches.keys() == {"query", "document"}
    assert best.plan.axes.tensor == 2
    placed, plain = step_times(result)
    assert placed < 0.95 * plain
    explanation = " ".join(explain(result, inputs))
    assert "a rank trains and combines 49.7 MiB of 99.4 MiB of weights" in explanation
    assert (
        f"The step is {1 - placed / plain:.1%} shorter than that of the best plan which does not place them"
        in explanation
    )


def test_towers_are_not_placed_where_one_has_most_of_the_work() -> None:
    """Documents are eight times as long as queries: in a large batch a rank with only the queries would wait."""
    inputs, result = search_for("towers", 65536)
    assert not result.ranked[0].plan.modules.branches
    best_placed = best_of(result, placed=True)
    placed, plain = step_times(result)
    assert placed > 1.5 * plain
    assert best_placed.prediction.breakdown["compute"] > result.ranked[0].prediction.breakdown["compute"]
    explanation = " ".join(explain(result, inputs))
    slower = placed / result.ranked[0].prediction.step_s - 1
    assert f"but that is {slower:.1%} slower: computing takes" in explanation


@pytest.mark.soak
def test_heads_are_placed_where_launching_them_takes_longer_than_the_encoder() -> None:
    inputs, result = search_for("heads", 32)
    best = result.ranked[0]
    assert set(best.plan.modules.branches) == {f"heads.task{number}" for number in range(8)}
    placed, plain = step_times(result)
    assert placed < 0.9 * plain
    best_unplaced = best_of(result, placed=False)
    assert best.prediction.breakdown["launch"] < best_unplaced.prediction.breakdown["launch"]
    assert "heads" in " ".join(explain(result, inputs))


@pytest.mark.soak
def test_heads_are_not_placed_where_every_rank_would_compute_the_encoder_for_more_samples() -> None:
    inputs, result = search_for("heads", 1024)
    assert not result.ranked[0].plan.modules.branches
    placed, plain = step_times(result)
    assert placed > 1.2 * plain
    assert "but that is" in " ".join(explain(result, inputs))


# ---- what is proposed


@pytest.mark.parametrize(("kind", "batch"), all_but([("towers", 4096)], [("towers", 4096), ("heads", 32)]))
def test_plans_can_be_run_and_bounds_are_below_them(kind: str, batch: int) -> None:
    inputs, result = search_for(kind, batch)
    profiles = towers() if kind == "towers" else tasks()
    calculator = BoundCalculator(summarize_model(inputs, profiles, "bf16"), inputs)
    placed = [priced for priced in (*result.ranked, *result.family_bests) if priced.plan.modules.branches]
    assert placed
    check = plan_checker(profiles.model, profiles.sample)
    for priced in placed:
        check(priced.plan)
        bound = calculator.bounds(priced.candidate)
        assert bound is not None
        assert bound.floor_s <= priced.prediction.step_s
        assert bound.memory_bytes <= priced.needed_bytes


def test_a_loss_over_the_whole_batch_is_never_cut_into_microbatches() -> None:
    _, result = search_plans("2xA100-80GB", towers(), 65536)
    assert result.ranked
    assert {priced.plan.microbatches for priced in (*result.ranked, *result.family_bests)} == {1}


def test_the_longest_branch_is_placed_first() -> None:
    assert assign_ranks([1.0, 5.0, 4.0, 2.0], 2) == [0, 0, 1, 1]
    assert assign_ranks([2.0, 2.0, 2.0], 3) == [0, 1, 2]


def test_shared_layers_are_named_once_for_all_blocks() -> None:
    inputs = PlanningInputs(find_cluster(NODES), 32, ADAMW)
    summary = summarize_model(inputs, tasks(), "bf16")
    heads = [f"heads.task{number}" for number in range(8)]
    whole = shared_layer_splits(summary, heads, 2, split=False)
    assert set(whole) == {"encoder.embedding", "encoder.blocks.*.attention.q", "encoder.blocks.*.feedforward.up"}
    assert {split.kind for split in whole.values()} == {"none"}
    assert not shared_layer_splits(summary, heads, 2, split=True)
    assert set(shared_layer_splits(summary, heads, 8, split=True)) == {
        "encoder.blocks.*.attention.q"
    }  # of twelve heads


class Tied(nn.Module):
    """A tower that runs twice, one that shares a weight, and two that are free."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(8, 8)
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.twice.weight

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> Tensor:
        sums = self.twice(self.twice(a)) + self.first(b) + self.second(c)
        return torch.cat([sums + self.third(d), self.tied(e)], dim=-1)


def test_only_branches_that_are_called_once_and_share_nothing_are_placed() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.sum() + target.sum()

    profiles = Profiles(Tied(), (*(torch.zeros(2, 8) for _ in range(5)), torch.zeros(2)), loss)
    profile = profiles.get("fp32", "none")
    assert profile.structure is not None
    groups = find_branch_groups(profile.structure, profile.parameters, profiles.module_calls())
    assert all({"twice", "tied"}.isdisjoint(unit) for group in groups for unit in group.branches)


class Inside(nn.Module):
    """Two towers inside a block."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.document = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.query(a) * self.document(b)

    def __init__(self) -> None:
        super().__init__()
        self.both = self.Both()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.both(a, b).sum(-1)


def test_blocks_with_branches_inside_are_not_recomputed() -> None:
    profiles = Profiles(Inside(), (torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(2)), nn.functional.mse_loss)
    inputs, _ = search_plans("2xA100-80GB", profiles, 8)
    summary = summarize_model(inputs, profiles, "bf16")
    summary.branch_groups = (BranchGroup("towers", (("both.query",), ("both.document",))),)
    for branches, levels in (("towers", {"none"}), ("", {"none", "selective", "full"})):
        sizes = AxisSizes(tensor=2, placed_branches=cast(Any, branches))
        series = candidate_series(summary, sizes, inputs, "bf16")
        assert {candidate.recompute for candidates in series for candidate in candidates} == levels


# ---- and runs


def prove(rank: int, size: int, plan: Plan, folder: Path) -> dict[str, Any] | None:
    torch.manual_seed(0)
    workload = ZOO["two_tower"]
    model = workload.model()
    optimizer = torch.optim.AdamW(model.parameters())
    user_model = UserModel(model, optimizer, workload.loss, RandomSamples(workload.data), BATCH)
    proof = prove_in_running_ranks(ProofRequest(user_model, plan), world(rank, size), folder)
    return proof.to_dict() if proof else None


@pytest.mark.soak
def test_the_best_plan_of_two_towers_trains_the_same_model(two: RankPool, tmp_path: Path) -> None:
    workload, data = ZOO["two_tower"], RandomSamples(ZOO["two_tower"].data)
    sample = torch.utils.data.default_collate([data[0], data[1]])
    _, result = search_plans("2xA100-80GB", Profiles(workload.model(), sample, workload.loss), BATCH, allow="same")
    plan = best_of(result, placed=True).plan
    assert plan == result.ranked[0].plan
    proof = two.run(prove, plan, tmp_path)[0]
    assert proof is not None
    assert proof["equal"], proof["first_difference"]
