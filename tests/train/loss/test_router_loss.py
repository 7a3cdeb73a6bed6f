"""Load-balancing losses of routers are recognized by what they compute, and refused where they cannot be global."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.planner.profiles import Profiles
from meshwright.train.loss import router_loss
from meshwright.train.loss.loss import check_sample_comparison
from meshwright.train.loss.trial import find_model_loss
from tests.proof.models.transformers_models import CASES, ListedMixture, Samples

SAMPLE = default_collate([Samples("causal")[0], Samples("causal")[1]])
TWICE = Plan.model_validate({"axes": {"replicate": 2}, "memory": {"accumulation": 2}})


def load_balancing_loss_func(
    gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Tensor | None = None
) -> Tensor:
    """Another loss with the name and the arguments of that of the transformers library: the entropy of choices."""
    mean = torch.stack(gate_logits).softmax(-1).mean((0, 1))
    return (mean * mean.log()).sum()


class OwnBalance(ListedMixture):
    """Adds a loss of its own that balances experts: a ten thousandth of the whole loss changes with the batch."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = super().forward(input_ids, attention_mask, labels)
        used = self.router(self.words(input_ids)).softmax(-1).mean((0, 1))
        return {**output, "loss": output["loss"] + 0.1 * (used * used).sum()}


def test_the_loss_of_transformers_is_recognized_and_does_not_hinder_the_trial() -> None:
    loss = find_model_loss(CASES["balanced mixtral"].build(), SAMPLE)
    assert loss.is_divisible
    assert loss.routers is not None
    assert find_model_loss(CASES["mixtral"].build(), SAMPLE).routers is None


def test_microbatches_and_servers_are_refused() -> None:
    loss = find_model_loss(CASES["balanced mixtral"].build(), SAMPLE)
    check_sample_comparison(loss, Plan.model_validate({"axes": {"replicate": 2}}))
    with pytest.raises(InputError, match="cuts a rank's share of it into 2 microbatches"):
        check_sample_comparison(loss, TWICE)
    assert Profiles(CASES["balanced mixtral"].build(), SAMPLE).compares_samples
    assert not Profiles(CASES["mixtral"].build(), SAMPLE).compares_samples


def test_another_loss_of_the_same_name_is_refused_under_plans_that_divide_the_batch() -> None:
    assert not router_loss._is_known(load_balancing_loss_func)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return load_balancing_loss_func((x,))

    routers = router_loss.RouterLosses(Model())
    x = torch.randn(6, 4, requires_grad=True)
    expected = Model()(x)
    routers.connect(Plan(), None)
    with routers.active(True):
        assert torch.equal(Model()(x), expected)
    routers.connect(Plan.model_validate({"axes": {"replicate": 2}}), None)
    with routers.active(True), pytest.raises(InputError, match="computes a load-balancing loss in a way of its own"):
        Model()(x)


def test_a_model_that_balances_its_experts_in_its_own_code_is_refused() -> None:
    torch.manual_seed(0)
    assert find_model_loss(ListedMixture(), SAMPLE).is_divisible
    assert not find_model_loss(OwnBalance(), SAMPLE).is_divisible
