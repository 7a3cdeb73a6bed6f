"""A model that decides by values of tensors trains as on one device, whatever its loss is a mean over."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright
from tests.ranks import RankPool

STEPS, SAMPLES = 3, 8


class Deciding(nn.Module):
    """Cannot be traced. Its forward pass changes a buffer, and its blocks are recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(2))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y * 0.5 if x.sum().item() > 1e9 else y + 0.5


class Counting(nn.Module):
    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        y: Tensor = torch.tanh(self.linear(x)) / self.passes
        return x + y


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SAMPLES, 6, generator=generator), torch.randint(4, (SAMPLES,), generator=generator))
        for _ in range(STEPS)
    ]


def train(rank: int, size: int, plan: dict[str, Any], has_sample: bool) -> None:
    torch.manual_seed(0)
    model = Deciding()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.02)
    for x, target in batches():
        optimizer.zero_grad()
        summed(reference(x), target).backward()
        optimizer.step()
    session = meshwright.parallelize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.02),
        loss=summed,
        plan=plan,
        device="cpu",
        sample_batch=batches()[0] if has_sample else None,
        check=False,
    )
    for batch in batches():
        session.step(tuple(value.chunk(size)[rank] for value in batch))
    state = session.state_dict()
    for name, value in reference.state_dict().items():
        assert torch.allclose(state[name], value, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("has_sample", [True, False])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_a_sum_is_not_taken_for_a_mean(two: RankPool, axis: str, recompute: str, has_sample: bool) -> None:
    two.run(train, {"axes": {axis: 2}, "memory": {"recompute": recompute}}, has_sample)
