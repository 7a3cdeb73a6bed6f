"""Branches are placed on ranks where that is predicted to pay, and only where it can be run."""

from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from meshwright.launch.world import World
from meshwright.parallel.check import checker
from meshwright.plan import Plan
from meshwright.planner.candidates import Layout, microbatches
from meshwright.planner.explain import explain
from meshwright.planner.outline import Placeable
from meshwright.planner.placing import assigned, beside, placeable
from meshwright.planner.profiles import Profiles
from meshwright.planner.prune import Bounder
from meshwright.planner.question import Question
from meshwright.planner.search import Choice, Found, outline_of
from meshwright.proof.prove import prove_in
from meshwright.proof.question import OwnModel
from meshwright.proof.question import Question as Proof
from meshwright.workloads.in_batch import InBatchSoftmax
from meshwright.workloads.multitask import Multitask, MultitaskLoss
from meshwright.workloads.towers import TwoTowers
from tests.planner.questions import ask
from tests.ranks import RankPool
from tests.zoo import BATCH, ZOO, Made

NODES = "2x8xA100-80GB"
KINDS: tuple[dict[str, Any], ...] = (
    {"kind": "classification", "classes": 4},
    {"kind": "regression"},
    {"kind": "similarity"},
    {"kind": "ranking"},
)


@cache
def towers(vocabulary: int = 100_000) -> Profiles:
    """Those of jobs/two_tower.yaml."""
    with torch.device("meta"):
        model = TwoTowers(vocabulary)
        query, document = torch.empty(4, 16, dtype=torch.long), torch.empty(4, 128, dtype=torch.long)
    return Profiles(model, (query, document, torch.empty(4, dtype=torch.long)), InBatchSoftmax())


@cache
def tasks(count: int = 8, layers: int = 2) -> Profiles:
    """Those of jobs/multitask.yaml, twice, on a shorter encoder."""
    named: dict[str, Any] = {f"task{number}": KINDS[number % len(KINDS)] for number in range(count)}
    with torch.device("meta"):
        model = Multitask(named, layers=layers)
        batch = torch.empty(4, 3, 128, dtype=torch.long), torch.empty(4, 2)
    return Profiles(model, batch, MultitaskLoss(named))


@cache
def answered(kind: str, batch: int) -> tuple[Question, Found]:
    return ask(NODES, towers() if kind == "towers" else tasks(), batch)


def best_of(found: Found, *, apart: bool) -> Choice:
    choices = [c for c in (*found.ranked, *found.others) if bool(c.plan.modules.branches) == apart]
    return min(choices, key=lambda choice: choice.prediction.step_s)


def both(found: Found) -> tuple[float, float]:
    """The best step with branches placed, and without."""
    placed, plain = (best_of(found, apart=apart).prediction.step_s for apart in (True, False))
    return placed, plain


# ---- which plan is best


def test_towers_are_placed_where_their_weights_take_longer_than_their_samples() -> None:
    question, found = answered("towers", 4096)
    best = found.ranked[0]
    assert best.plan.modules.branches.keys() == {"query", "document"}
    assert best.plan.axes.tensor == 2
    placed, plain = both(found)
    assert placed < 0.95 * plain
    said = " ".join(explain(found, question))
    assert "a rank has 52.12 of 104.2 MB of weights to train and combine" in said
    assert f"The step is {1 - placed / plain:.1%} shorter than that of the best plan which does not place them" in said


def test_towers_are_not_placed_where_one_has_most_of_the_work() -> None:
    """Documents are eight times as long as queries: in a large batch a rank with the queries alone would wait."""
    question, found = answered("towers", 65536)
    assert not found.ranked[0].plan.modules.branches
    other = best_of(found, apart=True)
    placed, plain = both(found)
    assert placed > 1.5 * plain
    assert other.prediction.breakdown["compute"] > found.ranked[0].prediction.breakdown["compute"]
    said = " ".join(explain(found, question))
    assert f"but that is {placed / plain - 1:.1%} slower: computing takes" in said


def test_heads_are_placed_where_starting_them_takes_longer_than_the_encoder() -> None:
    question, found = answered("heads", 32)
    best = found.ranked[0]
    assert set(best.plan.modules.branches) == {f"heads.task{number}" for number in range(8)}
    placed, plain = both(found)
    assert placed < 0.9 * plain
    other = best_of(found, apart=False)
    assert best.prediction.breakdown["launch"] < other.prediction.breakdown["launch"]
    assert "heads" in " ".join(explain(found, question))


def test_heads_are_not_placed_where_every_rank_would_compute_the_encoder_for_more_samples() -> None:
    question, found = answered("heads", 1024)
    assert not found.ranked[0].plan.modules.branches
    placed, plain = both(found)
    assert placed > 1.2 * plain
    assert "but that is" in " ".join(explain(found, question))


# ---- what is proposed


@pytest.mark.parametrize(("kind", "batch"), [("towers", 4096), ("heads", 32)])
def test_plans_can_be_run_and_bounds_are_below_them(kind: str, batch: int) -> None:
    question, found = answered(kind, batch)
    profiles = towers() if kind == "towers" else tasks()
    bounder = Bounder(outline_of(question, profiles, "bf16"), question)
    placed = [c for c in (*found.ranked, *found.others) if c.plan.modules.branches]
    assert placed
    check = checker(profiles.model, profiles.sample)
    for choice in placed:
        check(choice.plan)
        bound = bounder.bounds(choice.candidate)
        assert bound is not None
        assert bound.floor_s <= choice.prediction.step_s
        assert bound.memory_bytes <= choice.needs_bytes


def test_a_loss_over_the_whole_batch_is_never_cut_into_microbatches() -> None:
    _, found = ask("2xA100-80GB", towers(), 65536)
    assert found.ranked
    assert {choice.plan.microbatches for choice in (*found.ranked, *found.others)} == {1}


def test_the_longest_branch_is_placed_first() -> None:
    assert assigned([1.0, 5.0, 4.0, 2.0], 2) == [0, 0, 1, 1]
    assert assigned([2.0, 2.0, 2.0], 3) == [0, 1, 2]


def test_what_is_shared_is_named_once_for_all_blocks() -> None:
    question, _ = answered("heads", 32)
    outline = outline_of(question, tasks(), "bf16")
    heads = [f"heads.task{number}" for number in range(8)]
    whole = beside(outline, heads, 2, split=False)
    assert set(whole) == {"encoder.embedding", "encoder.blocks.*.attention.q", "encoder.blocks.*.feedforward.up"}
    assert {split.kind for split in whole.values()} == {"none"}
    assert not beside(outline, heads, 2, split=True)
    assert set(beside(outline, heads, 8, split=True)) == {"encoder.blocks.*.attention.q"}  # of twelve heads


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
    found = profiles.get("fp32", "none")
    assert found.structure is not None
    free = placeable(found.structure, found.parameters, profiles.calls())
    assert all({"twice", "tied"}.isdisjoint(unit) for one in free for unit in one.branches)


class Inside(nn.Module):
    """Towers in a block of their own."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.one(a) * self.other(b)

    def __init__(self) -> None:
        super().__init__()
        self.both = self.Both()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.both(a, b).sum(-1)


def test_branches_inside_of_a_block_are_not_computed_again() -> None:
    profiles = Profiles(Inside(), (torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(2)), nn.functional.mse_loss)
    question, _ = ask("2xA100-80GB", profiles, 8)
    outline = outline_of(question, profiles, "bf16")
    outline.placeable = (Placeable("towers", (("both.one",), ("both.other",))),)
    for apart, kinds in (("towers", {"none"}), ("", {"none", "selective", "full"})):
        layout = Layout(tensor=2, apart=cast(Any, apart))
        found = [one for growing in microbatches(outline, layout, question, "bf16") for one in growing]
        assert {candidate.recompute for candidate in found} == kinds


# ---- and runs


def prove(rank: int, size: int, plan: Plan, folder: Path) -> dict[str, Any] | None:
    torch.manual_seed(0)
    made = ZOO["two_tower"]
    model = made.model()
    own = OwnModel(model, torch.optim.AdamW(model.parameters()), made.loss, Made(made.data), BATCH)
    world = World(rank, rank, size, size, 0, torch.device("cpu"), None)
    proof = prove_in(Proof(own, plan), world, folder)
    return proof.to_dict() if proof else None


def test_the_best_plan_of_two_towers_trains_the_same_model(two: RankPool, tmp_path: Path) -> None:
    made, data = ZOO["two_tower"], Made(ZOO["two_tower"].data)
    sample = torch.utils.data.default_collate([data[0], data[1]])
    _, found = ask("2xA100-80GB", Profiles(made.model(), sample, made.loss), BATCH, exact=True)
    plan = best_of(found, apart=True).plan
    assert plan == found.ranked[0].plan
    proof = two.run(prove, plan, tmp_path)[0]
    assert proof is not None
    assert proof["equal"], proof["first_difference"]
