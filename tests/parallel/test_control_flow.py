"""Models whose code depends on the values of tensors. They run under replicate and shard, are split only as the plan
says, and are not cut into stages."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import InputError
from meshwright.parallel.check import check_plan
from meshwright.plan import Plan
from meshwright.profile.different_blocks import may_run_different_blocks
from tests.ranks import RankPool

SPLITS = {"up": {"kind": "column"}, "down": {"kind": "row"}, "again": {"kind": "column"}}
X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 3


class Deciding(nn.Module):
    """A branch and a loop that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.again, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x + self.down(torch.relu(self.up(x)))
        hidden = hidden * 2 if hidden.sum() > 0 else hidden - 1
        for _ in range(int(x.abs().sum()) % 3 + 1):
            hidden = torch.tanh(self.again(hidden))
        scores: Tensor = self.head(hidden)
        return scores


class EndingEarly(nn.Module):
    """Runs as many blocks as the first value of the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in list(self.blocks)[: 1 + int(x[0, 0] > 0) * 3]:
            x = x + block(x)
        scores: Tensor = self.head(x)
        return scores


class DecidingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) if x.sum() > 0 else x - self.layer(x)


class DecidingInBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DecidingBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build(kind: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return kind().double()


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def train_plainly(kind: type[nn.Module], batches: list[Any]) -> dict[str, Tensor]:
    """Trains on the mean of the losses of several batches."""
    module = build(kind)
    optimizer = sgd(module)
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack([F.cross_entropy(module(x), y) for x, y in batches]).mean().backward()
        optimizer.step()
    return module.state_dict()


def train_under(
    rank: int, size: int, kind: type[nn.Module], plan: dict[str, Any], batches: list[Any]
) -> dict[str, Tensor]:
    module = build(kind)
    # Unchecked, because the models decide by the samples of a rank, which the check before training refuses.
    session = mw.parallelize(
        module,
        sgd(module),
        loss=F.cross_entropy,
        plan=plan,
        device="cpu",
        sample_batch=(X[:2], Y[:2]),
        timeout_s=20,
        check=False,
    )
    for _ in range(2):
        session.step(batches[rank % len(batches)])
    return session.state_dict()


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"shard": 2}, {"replicate": 2}])
def test_a_model_that_decides_by_values_equals_one_device(two: RankPool, axes: dict[str, int]) -> None:
    halves = [(X[:4], Y[:4]), (X[4:], Y[4:])]
    batches = [(X, Y)] if "tensor" in axes else halves
    plan = {"axes": axes, "modules": {"splits": SPLITS if "tensor" in axes else {}}}
    expected = train_plainly(Deciding, batches)
    for state in two.run(train_under, Deciding, plan, batches):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("axis", ["shard", "replicate"])
def test_ranks_may_run_different_blocks(two: RankPool, axis: str) -> None:
    """Under shard, blocks that were gathered one by one would make the ranks wait for each other forever."""
    positive, negative = X.clone(), X.clone()
    positive[0, 0], negative[0, 0] = 1.0, -1.0
    batches = [(positive, Y), (negative, Y)]
    expected = train_plainly(EndingEarly, batches)
    for state in two.run(train_under, EndingEarly, {"axes": {axis: 2}}, batches):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def test_only_code_outside_of_blocks_decides_which_blocks_run() -> None:
    sample = (X[:2].float(), Y[:2])
    assert not may_run_different_blocks(DecidingInBlocks(), None, sample, None)
    assert may_run_different_blocks(EndingEarly(), None, sample, None)
    assert not may_run_different_blocks(EndingEarly(), None, None, None)


@pytest.mark.parametrize(
    "plan",
    [
        {"axes": {"tensor": 2}},
        {"axes": {"tensor": 2}, "modules": {"splits": {"head": {"kind": "none"}}}},
        {"axes": {"pipeline": 2}, "pipeline": {"cuts": ["down"], "microbatches": 2}},
    ],
)
def test_plans_that_need_a_trace_are_refused(plan: dict[str, Any]) -> None:
    words = r"code depends on the values of tensors \(.*, line \d+\)\. So it cannot be cut .* splits"
    with pytest.raises(InputError, match=words):
        check_plan(Plan.model_validate(plan), build(Deciding), (X, Y))


def test_a_split_of_an_unknown_module_is_refused_without_a_trace() -> None:
    plan = Plan.model_validate({"axes": {"tensor": 2}, "modules": {"splits": {"dwon": {"kind": "row"}}}})
    with pytest.raises(InputError, match="no module 'dwon': did you mean 'down'"):
        check_plan(plan, build(Deciding), (X, Y))
