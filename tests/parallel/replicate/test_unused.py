"""Parameters that get no gradient are named, once, under every kind of plan and in loops with their own backward."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import meshwright as mw
from meshwright.parallel.replicate.unused import WATCHED_STEPS, describe_unused
from tests.ranks import RankPool

PLANS: dict[str, dict[str, Any]] = {
    "replicate": {"axes": {"replicate": 2}},
    "our averaging": {"axes": {"replicate": 2}, "gradients": {"algorithm": "ring"}, "memory": {"accumulation": 2}},
    "shard": {"axes": {"shard": 2}},
    "tensor": {"axes": {"tensor": 2}},
    "pipeline": {"axes": {"pipeline": 2}, "pipeline": {"cuts": ["blocks.0"], "microbatches": 2}},
}
UNUSED = ["left_out.weight", "left_out.bias", "blocks.2.bypassed"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.bypassed = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).relu() * self.bypassed
        return out


class LastBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).relu() + 0 * self.bypassed.detach()
        return out


class Net(nn.Module):
    """`rare` is used in the last one of the watched steps only, and `frozen` never."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.rare = nn.Parameter(torch.zeros(8))
        self.blocks = nn.Sequential(Block(), Block(), LastBlock())
        self.head = nn.Linear(8, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        x = x + self.rare if self.calls == WATCHED_STEPS else x
        out: Tensor = self.head(self.blocks(x))
        return out


class Straight(Net):
    """Without a branch on a number of calls, which a plan that traces the model would see only one side of."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x + self.rare))
        return out


def train(plan: dict[str, Any] | None, model: nn.Module, own_backward: bool = False) -> list[str]:
    """Trains some steps, and returns the warnings about parameters."""
    data = TensorDataset(torch.randn(16, 8), torch.arange(16) % 4)
    batch = data[:8]
    session = mw.parallelize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=F.cross_entropy,
        plan=plan,
        device="cpu",
        sample_batch=batch,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for part in session.batches(data, epochs=WATCHED_STEPS, global_batch=8):
            if own_backward:
                session.backward(session.forward(batch))
                session.optimizer.step()
                session.optimizer.zero_grad()
            else:
                session.step(part)
    return [str(warning.message) for warning in caught if "no gradient" in str(warning.message)]


def train_under_plans(rank: int, size: int) -> dict[str, list[str]]:
    return {name: train(plan, Straight()) for name, plan in PLANS.items()}


def test_every_kind_of_plan_names_them_on_rank_0(two: RankPool) -> None:
    line = describe_unused(UNUSED)
    assert two.run(train_under_plans) == [{name: [line] for name in PLANS}, {name: [] for name in PLANS}]


@pytest.mark.parametrize("own_backward", [False, True])
def test_a_parameter_that_one_of_the_first_steps_uses_is_not_named(own_backward: bool) -> None:
    assert train(None, Net(), own_backward) == [describe_unused(UNUSED)]


def test_a_model_that_uses_all_its_parameters_is_not_warned_about() -> None:
    assert train(None, nn.Linear(8, 4)) == []


def test_of_many_names_some_are_shown() -> None:
    many = describe_unused([f"w{number}" for number in range(10)])
    assert "so they are not trained: w0, w1, w2, w3, w4, w5, w6, w7 and 2 more. " in many
    assert describe_unused(["w"]).startswith("1 parameter got no gradient in the first 10 steps, so it is")
