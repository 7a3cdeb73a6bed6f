"""`Accelerator(plan="auto")`."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("accelerate", reason="the package accelerate is not installed")

from meshwright.compat.accelerate import Accelerator, automatic_plan
from meshwright.errors import InputError
from meshwright.plan import Plan
from tests.compat.accelerate.loops import accelerate_process, network, samples


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.network(inputs), target)


def test_the_plan_is_that_of_best_plan_for_the_loaders_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def best_plan(model: nn.Module, batch: Any, **options: Any) -> Plan:
        calls.append(([part.shape[0] for part in batch], options["global_batch"], options["device"]))
        return Plan.model_validate({"compute": {"fused_optimizer": True}})

    monkeypatch.setattr(automatic_plan, "best_plan", best_plan)
    with accelerate_process():
        accelerator, model = Accelerator(plan="auto"), WithLoss()
        loader: Any = DataLoader(samples(), batch_size=8, shuffle=True)
        state = torch.get_rng_state()
        model, optimizer, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
        assert torch.equal(torch.get_rng_state(), state)
        assert accelerator.plan.compute.fused_optimizer
        assert optimizer.optimizer.defaults["fused"]
    assert calls == [([8, 8], 8, "cpu")]


def test_without_a_plan_that_can_run_every_rank_is_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    def best_plan(*args: Any, **options: Any) -> Plan:
        raise InputError("the model returns no loss")

    monkeypatch.setattr(automatic_plan, "best_plan", best_plan)
    with accelerate_process():
        accelerator = Accelerator(plan="auto")
        with pytest.warns(UserWarning, match="is a replica, because: the model returns no loss"):
            accelerator.prepare(WithLoss(), DataLoader(samples(), batch_size=8))
        assert accelerator.plan == Plan()


def test_auto_needs_a_loader() -> None:
    with accelerate_process(), pytest.raises(InputError, match="give the model and its DataLoader to one call"):
        Accelerator(plan="auto").prepare(WithLoss())


@pytest.mark.soak
def test_the_search_considers_only_plans_that_loops_of_accelerate_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the fastest plan, only the precision may be another one than that of the search."""
    checked: list[Plan] = []

    def check_plan(plan: Plan) -> None:
        checked.append(plan)
        if plan.compute.fused_optimizer:
            raise InputError("stands for what a loop cannot run")

    monkeypatch.setattr(automatic_plan, "check_plan", check_plan)
    with accelerate_process(), warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator, model = Accelerator(plan="auto", mixed_precision="bf16"), WithLoss()
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader(samples(), batch_size=8))
        assert accelerator.plan.numerics.precision == "bf16"
        assert not accelerator.plan.compute.fused_optimizer
    assert checked
