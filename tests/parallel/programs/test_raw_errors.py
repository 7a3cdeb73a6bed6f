"""Passes that torch refuses under a plan only, and weights that the model uses outside of their modules."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright.errors import InputError
from tests.parallel.programs import raw_models
from tests.ranks import RankFailure, RankPool

PLANS: dict[str, dict[str, Any]] = {
    "context": {"axes": {"context": 2}},
    "tensor": {"axes": {"tensor": 2}},
    "sequence": {"axes": {"tensor": 2}, "modules": {"sequence": True}},
    "pipeline": {"axes": {"pipeline": 2}, "pipeline": {"microbatches": 2, "cuts": ["first"]}},
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 11, (4, 8), generator=generator), torch.randint(0, 11, (4, 8), generator=generator)


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def train(rank: int, size: int, model_class: str, plan: str) -> float:
    """Returns how far the weights of three steps are from those of one device."""
    torch.manual_seed(0)
    plain: torch.nn.Module = getattr(raw_models, model_class)().double()
    torch.manual_seed(0)
    model = getattr(raw_models, model_class)().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = mw.parallelize(
        model, optimizer, loss=loss, plan=PLANS[plan], device="cpu", sample_batch=batch(0), check=False
    )
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        session.step(batch(step))
        tokens, targets = batch(step)
        plain_optimizer.zero_grad()
        loss(plain(tokens), targets).backward()
        plain_optimizer.step()
    expected = plain.state_dict()
    return max(float((value - expected[name]).abs().max()) for name, value in session.state_dict().items())


@pytest.mark.parametrize("plan", ["tensor", "sequence"])
@pytest.mark.parametrize("model", ["EmbeddingAsMatrix", "EvenEmbedding"])
def test_a_table_that_is_used_as_a_matrix_stays_whole(two: RankPool, model: str, plan: str) -> None:
    assert max(two.run(train, model, plan)) < 1e-12


def refuse(rank: int, size: int, model: str, plan: str) -> None:
    """Raises the error in other words, so that the pool need not wait for a rank that waits for another one."""
    try:
        train(rank, size, model, plan)
    except InputError as error:
        raise AssertionError(f"in one line: {error}") from None


@pytest.mark.parametrize(
    ("model", "plan", "line"),
    [
        (
            "OwnBackward",
            "context",
            "uses the gradient of a tensor that is divided over the 2 ranks of the context axis",
        ),
        (
            "OwnBackward",
            "sequence",
            "uses the gradient of a tensor that is divided over the 2 ranks of the tensor axis",
        ),
        ("GradientInForward", "pipeline", "RuntimeError: element 0 of tensors does not require grad"),
        ("Counted", "pipeline", "RuntimeError: one of the variables needed for gradient computation"),
        ("TiedLast", "pipeline", "the model calls second.out, or uses its weights, also from outside of the module"),
    ],
)
def test_a_pass_that_a_plan_prevents_is_refused_in_one_line(model: str, plan: str, line: str) -> None:
    pool = RankPool(2, timeout_s=60)  # whose ranks are of no use afterwards
    try:
        with pytest.raises(RankFailure) as failure:
            pool.run(refuse, model, plan)
    finally:
        pool.close()
    text = str(failure.value)
    assert line in text.partition("in one line: ")[2]
    if model in ("GradientInForward", "OwnBackward"):
        assert "raw_models.py, line " in text.partition("in one line: ")[2]
    axis = {"context": "context", "sequence": "tensor"}.get(plan, "pipeline")
    assert f"set plan.axes.{axis} to 1" in text


def test_what_the_model_raises_is_shown_as_it_is() -> None:
    pool = RankPool(2, timeout_s=60)
    try:
        with pytest.raises(RankFailure, match="RuntimeError: my own check") as failure:
            pool.run(refuse, "Refused", "pipeline")
    finally:
        pool.close()
    assert "in one line: " not in str(failure.value)
