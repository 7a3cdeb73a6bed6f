"""The refusal of an unequal plan names the first operator whose values differ, with its module and line."""

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import UnequalPlan
from tests.proof.before_training.helper import activate
from tests.ranks import RankPool


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Middle(nn.Module):
    """Adds another number on ranks than on one device."""

    def forward(self, x: Tensor) -> Tensor:
        y = activate(x) * 2
        y = y + _number()  # the broken line
        return y.cumsum(1)


def _number() -> float:
    """0.5 while ranks train, and 0 while one device computes."""
    return 0.5 * any(frame.f_code.co_name == "record" for frame, _ in traceback.walk_stack(None))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.middle, self.second = nn.Embedding(11, 8), Attention(), Middle(), Attention()
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.second(self.middle(self.first(self.embed(tokens)))))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def refusal(rank: int, size: int, plan: dict[str, Any]) -> str:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(11, (4, 8))
    with pytest.raises(UnequalPlan) as caught:
        mw.parallelize(model, optimizer, loss=loss, plan=plan, device="cpu", sample_batch=(tokens, tokens))
    return str(caught.value)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({"axes": {"context": 2}}, marks=pytest.mark.soak),  # the fourth one has more
        {"axes": {"tensor": 2}},
        {"axes": {"tensor": 2}, "modules": {"sequence": True}},
        {"axes": {"context": 2}, "memory": {"recompute": "full", "accumulation": 2}},
        {"axes": {"pipeline": 2}, "pipeline": {"microbatches": 2, "cuts": ["middle"]}},
    ],
    ids=["context", "tensor", "sequence", "context, recomputed, accumulated", "pipeline"],
)
def test_the_first_operator_that_differs_is_named(two: RankPool, plan: dict[str, Any]) -> None:
    messages = two.run(refusal, plan)
    assert len(set(messages)) == 1
    line = 1 + next(
        number for number, text in enumerate(Path(__file__).read_text().splitlines()) if "# the broken" in text
    )
    assert "result of add of middle" in messages[0], messages[0]
    assert f"{__file__}, line {line}" in messages[0]
