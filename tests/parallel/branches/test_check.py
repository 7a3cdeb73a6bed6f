"""Branches that cannot run on a rank of their own are refused, with the module and the reason."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.parallel.check import check_plan
from meshwright.plan import Plan
from tests.zoo import MultiTask, TwoTowers


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.tower(a) * self.tower(b)).sum(-1) + self.head(a).sum(-1)


class ReadsAttribute(nn.Module):
    """Its branch reads the trunk's result from an attribute instead of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(4, 4), CalledTwice()
        self.side = nn.Linear(4, 4)
        self.head.forward = self.head_forward  # type: ignore[assignment]

    def head_forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head.tower(self.trunk_output) + x
        return out

    def forward(self, x: Tensor) -> Tensor:
        self.trunk_output = self.trunk(x)
        out: Tensor = self.head(x) + self.side(self.trunk_output)
        return out


class OverwritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.a = nn.Sequential(nn.ReLU(True), nn.Linear(4, 4))
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        out: Tensor = self.a(x) + self.b(x)
        return out


def tied_towers() -> nn.Module:
    model = TwoTowers()
    model.document.words.weight = model.query.words.weight
    return model


TOKENS = (torch.ones(2, 6, dtype=torch.long), torch.ones(2, 6, dtype=torch.long), torch.ones(2))
NUMBERS = (torch.ones(2, 4), torch.ones(2, 4), torch.ones(2))


@pytest.mark.parametrize(
    ("model", "sample", "branches", "more_fields", "messages"),
    [
        (TwoTowers, TOKENS, {"querry": 0}, {}, "has no module 'querry': did you mean 'query'?"),
        (TwoTowers, TOKENS, {"query": 0, "query.words": 1}, {}, "branches.query.words: it lies in query"),
        (tied_towers, TOKENS, {"query": 0, "document": 1}, {}, "query.words.weight is tied to document.words.weight"),
        (CalledTwice, NUMBERS, {"tower": 0}, {}, "branches.tower: it is called 2 times in a forward pass"),
        (
            ReadsAttribute,
            NUMBERS[1:],
            {"head": 0},
            {},
            "uses (t) a result from outside|uses (addmm) a result",
        ),
        (ReadsAttribute, NUMBERS[1:], {"head.head": 0}, {}, "branches.head.head: it is never called"),
        (
            OverwritesInput,
            NUMBERS[1:],
            {"a": 0, "b": 1},
            {},
            "a.0 overwrites in place (relu_) what the branch",
        ),
        (
            MultiTask,
            (torch.ones(2, 12), torch.ones(2)),
            {"classify": 0},
            {"modules": {"splits": {"classify.0": {"kind": "column"}}}},
            "plan.modules.splits divides classify.0 among several",
        ),
        (
            TwoTowers,
            TOKENS,
            {"query": 0},
            {"axes": {"pipeline": 2}, "pipeline": {"cuts": ["query"]}},
            "remove the branches, or set axes.pipeline to 1",
        ),
        (TwoTowers, TOKENS, {"query.words": 0}, {"memory": {"recompute": "full"}}, "lies in query, which plan.memory"),
    ],
)
def test_branches_that_cannot_run_alone_are_refused(
    model: Any, sample: Any, branches: dict[str, int], more_fields: dict[str, Any], messages: str
) -> None:
    fields: dict[str, Any] = {"axes": {"tensor": 2}, "modules": {"branches": branches}}
    for group, group_fields in more_fields.items():
        fields.setdefault(group, {}).update(group_fields)
    with pytest.raises(InputError) as raised:
        check_plan(Plan.model_validate(fields), model(), sample)
    assert any(message in str(raised.value) for message in messages.split("|"))
