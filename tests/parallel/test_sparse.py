"""Sparse gradients are averaged over the replicate axis by every algorithm; other plans are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from meshwright.errors import InputError
from meshwright.parallel.check import check_sparse
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes, Gradients
from meshwright.train.session import Session
from tests.ranks import run_ranks
from tests.train.one_process import world


class WordClassifier(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(12, 4, sparse=sparse), nn.Linear(4, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.table(words).mean(1))


def _train(rank: int, ranks: int, algorithm: str, sparse: bool) -> dict[str, Any]:
    torch.manual_seed(2)
    generator = torch.Generator().manual_seed(4)
    # No sample has a word of the table's second half.
    data = TensorDataset(torch.randint(6, (24, 5), generator=generator), torch.randint(3, (24,), generator=generator))
    gradients = Gradients.model_validate({"algorithm": algorithm})
    session = Session(
        WordClassifier(sparse).double(),
        lambda parameters: torch.optim.Adagrad(parameters.values(), lr=0.5),
        loss=nn.functional.cross_entropy,
        plan=Plan(axes=Axes(replicate=ranks), gradients=gradients),
        world=world(rank, ranks),
    )
    losses = [float(session.step(batch)) for batch in session.batches(data, 2, 8)]
    gradient = session.module.get_parameter("table.weight").grad
    assert gradient is not None
    assert (gradient.layout == torch.sparse_coo) == sparse
    return {"losses": losses, "weights": session.state_dict()}


@pytest.mark.parametrize("algorithm", ["auto", "native", "ring"])
def test_replicas_train_as_one_process_with_dense_gradients(algorithm: str) -> None:
    expected = _train(0, 1, "native", False)
    for result in run_ranks(_train, 2, algorithm, True):
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-12)
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("axes", [{"shard": 2}, {"tensor": 2}, {"replicate": 2, "pipeline": 2}])
def test_plans_that_divide_weights_are_refused(axes: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"table has sparse gradients.*build table with sparse=False"):
        check_sparse(Plan(axes=Axes(**axes)), WordClassifier(True))
    check_sparse(Plan(axes=Axes(**axes)), WordClassifier(False), 1.0)
    check_sparse(Plan(axes=Axes(replicate=4)), WordClassifier(True))


def test_clipping_and_loss_scaling_of_sparse_gradients_are_refused() -> None:
    with pytest.raises(InputError, match=r"PyTorch cannot clip, but train.clip_norm is 1.0.*or remove train.clip_norm"):
        check_sparse(Plan(), WordClassifier(True), 1.0)
    with pytest.raises(InputError, match=r"but plan.numerics.precision is fp16.*or choose another precision"):
        check_sparse(Plan.model_validate({"numerics": {"precision": "fp16"}}), WordClassifier(True))
    with pytest.raises(InputError, match=r"train.clip_norm"):
        Session(
            WordClassifier(True),
            lambda parameters: torch.optim.SGD(parameters.values(), lr=0.1),
            loss=nn.functional.cross_entropy,
            plan=Plan(),
            world=world(),
            clip_norm=1.0,
        )
