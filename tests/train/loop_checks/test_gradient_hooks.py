"""Tests that hooks on gradients train as on one device, or are refused by name."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.train.loop_checks.gradient_hooks import check_gradient_hooks
from tests.ranks import RankPool


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.first(x).tanh())
        return y


def mask(model: Model) -> None:
    model.first.weight.register_hook(lambda gradient: gradient * torch.eye(8).to(gradient))


def clip(model: Model) -> None:
    model.first.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def signs(model: Model) -> None:
    def take_signs(parameter: Any) -> None:
        parameter.grad.copy_(parameter.grad.sign())

    model.first.weight.register_post_accumulate_grad_hook(take_signs)


def new_weight(model: Model) -> None:
    model.first.weight = nn.Parameter(torch.eye(8, dtype=torch.float64))


def forward(model: Model) -> None:
    model.first.register_forward_hook(lambda module, inputs, output: output * 2)


def freeze(model: Model) -> None:
    model.first.weight.requires_grad_(False)


def train(rank: int, axis: str, change: Callable[[Model], None], after_steps: int | None) -> str:
    """Makes the change before `parallelize` if `after_steps` is None, otherwise after so many steps. Returns `equal`,
    `unequal` or the error."""
    torch.manual_seed(0)
    model = Model().double()
    reference = deepcopy(model)
    if after_steps is None:
        for changed in (model, reference):
            change(changed)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = {"axes": {axis: 2}}
        session = mw.parallelize(model, optimizer, loss=F.cross_entropy, plan=plan, device="cpu")
        for step in range(3):
            if after_steps == step:
                for changed in (session.module, reference):
                    assert isinstance(changed, Model)
                    change(changed)
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(8, 8, generator=generator, dtype=torch.float64)
            target = torch.randint(3, (8,), generator=generator)
            session.step((inputs[rank * 4 : rank * 4 + 4], target[rank * 4 : rank * 4 + 4]))
            alone.zero_grad()
            F.cross_entropy(reference(inputs), target).backward()
            alone.step()
    except InputError as error:
        return str(error)
    expected, weights = reference.state_dict(), session.state_dict()
    is_equal = all(torch.allclose(weights[name], expected[name], rtol=1e-10, atol=1e-12) for name in expected)
    return "equal" if is_equal else "unequal"


def outcomes(rank: int, size: int) -> dict[str, str]:
    changes = (mask, clip, signs, forward, freeze, new_weight)
    return {
        f"{axis} {change.__name__} {after_steps}": train(rank, axis, change, after_steps)
        for axis in ("replicate", "shard")
        for change in changes
        for after_steps in (None, 0, 1)
    }


def test_hooks_train_as_on_one_device_or_are_refused(two: RankPool) -> None:
    late = [f"shard {name} {step}" for name in ("mask", "clip") for step in (0, 1)]
    nonlinear = [
        *(f"replicate {name} {step}" for name in ("clip", "signs") for step in (None, 0, 1)),
        *("shard clip None", "shard signs None"),
    ]
    replaced = ["shard new_weight 0", "shard new_weight 1"]
    for results in two.run(outcomes):
        refused = {name: text for name, text in results.items() if text != "equal"}
        assert set(refused) == {*late, *nonlinear, *replaced}
        assert all("first.weight was registered after parallelize" in refused[name] for name in late)
        assert all("first.weight is not linear" in refused[name] for name in nonlinear)
        assert all("first.weight was replaced after parallelize" in refused[name] for name in replaced)


@pytest.mark.parametrize("change", [clip, signs])
@pytest.mark.parametrize(
    "plan",
    [{"axes": {"context": 2}}, {"axes": {"tensor": 2}, "modules": {"sequence": True}}],
    ids=["context", "sequence"],
)
def test_hooks_that_are_not_linear_are_refused_where_tokens_are_divided(
    plan: dict[str, Any], change: Callable[[Model], None]
) -> None:
    model = Model()
    change(model)
    with pytest.raises(InputError, match=r"first\.weight is not linear"):
        check_gradient_hooks(model, Plan.model_validate(plan))
    check_gradient_hooks(model, Plan.model_validate({"axes": {"tensor": 2}}))
