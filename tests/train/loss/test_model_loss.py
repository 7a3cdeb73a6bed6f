"""Losses that models compute themselves: the model gets the whole batch, and its loss is weighted by what it is a mean
over, or refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.train.loss.trial import find_model_loss
from meshwright.train.session import Session
from tests.proof.models.transformers_models import CASES, Samples
from tests.soaked import all_but
from tests.train.one_process import world

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, -100, 1])


class Scored(nn.Module):
    """Returns its loss in one of several forms."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.kind = kind

    def forward(self, x: Tensor, y: Tensor) -> Any:
        scores = self.layer(x)
        loss = {
            "mean": lambda: F.cross_entropy(scores, y),
            "sum": lambda: scores.square().sum(),
            "squares": lambda: scores.square().mean(),
            "contrast": lambda: (scores @ scores.T).softmax(1).diagonal().mean(),
            "two means": lambda: F.cross_entropy(scores, y) + F.cross_entropy(scores, y.clamp(min=0)),
        }[self.kind]()
        return {"loss": loss, "scores": scores}


def test_the_model_gets_the_whole_batch_and_its_loss_counts_its_targets() -> None:
    loss = find_model_loss(Scored("mean"), (X, Y))
    model = Scored("mean")
    with loss.forward_context():
        output = model(X, Y)
    counted = loss.function(output, Y)
    assert int(counted.number) == 5
    assert counted.mean is output["loss"]
    torch.testing.assert_close(counted.total / 5, output["loss"])
    assert loss.is_divisible


@pytest.mark.parametrize(("kind", "expected"), [("sum", "sum"), ("squares", "samples")])
def test_losses_without_cross_entropies_are_tried(kind: str, expected: str) -> None:
    loss = find_model_loss(Scored(kind), (X, Y))
    assert (loss.kind, loss.is_divisible) == (expected, True)


def session(model: nn.Module, plan: dict[str, Any]) -> Session:
    return Session(
        model,
        lambda parameters: torch.optim.AdamW(parameters.values(), lr=0.01),
        loss=None,
        plan=Plan.model_validate(plan),
        world=world(0, 1),
        sample=(X[3:], Y[3:]) if isinstance(model, Scored) else None,
    )


@pytest.mark.parametrize("kind", ["contrast", "two means"])
def test_a_loss_that_cannot_be_divided_is_refused_unless_the_batch_is_whole(kind: str) -> None:
    with pytest.raises(InputError, match=r"neither a mean nor a sum .* use a plan without data parallelism"):
        session(Scored(kind), {"memory": {"accumulation": 2}})
    whole = session(Scored(kind), {})
    model = Scored(kind)
    model.load_state_dict(whole.state_dict())
    assert float(whole.step((X, Y))) == pytest.approx(float(model(X, Y)["loss"]))


def test_a_rank_without_a_valid_target_adds_nothing() -> None:
    ignored = session(Scored("mean"), {})
    before = ignored.state_dict()["layer.weight"].clone()
    assert float(ignored.step((X, torch.full_like(Y, -100)))) == 0
    torch.testing.assert_close(ignored.state_dict()["layer.weight"], before, rtol=0.02, atol=0)  # weight decay alone


@pytest.mark.parametrize("name", all_but({"llama", "mixtral", "t5", "vit"}, CASES))
def test_models_of_transformers_train_with_their_own_loss(name: str) -> None:
    accumulation = 1 if name.startswith("balanced") else 2  # a load-balancing loss compares all tokens of the batch
    with torch.random.fork_rng():
        torch.manual_seed(0)
        trained = session(CASES[name].build(), {"memory": {"accumulation": accumulation}})
    batches = trained.batches(Samples(CASES[name].samples), global_batch=21)
    losses = [float(trained.step(next(batches))) for _ in range(20)]
    assert losses[-1] < 0.95 * losses[0]
