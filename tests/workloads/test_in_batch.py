"""In-batch softmax: over many ranks the loss, the gradient and the evaluation of one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from meshwright.errors import InputError
from meshwright.launch.world import World
from meshwright.plan import Axes, Memory, Plan
from meshwright.train.session import Session
from meshwright.workloads.in_batch import InBatchAccuracy, InBatchSoftmax
from tests.ranks import run_ranks

SAMPLES = 7  # which neither two nor three ranks divide


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.document = nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, query: Tensor, document: Tensor) -> tuple[Tensor, Tensor]:
        return self.query(query), self.document(document)


def _dataset(samples: int = SAMPLES) -> TensorDataset:
    random = torch.Generator().manual_seed(3)
    queries, documents = (torch.randn(samples, 5, generator=random, dtype=torch.float64) for _ in range(2))
    return TensorDataset(queries, documents, torch.zeros(samples))


def _session(rank: int, world_size: int, plan: Plan, symmetric: bool) -> Session:
    torch.manual_seed(1)
    return Session(
        Towers().double(),
        lambda parameters: torch.optim.SGD(parameters.values(), lr=0.5),
        loss=InBatchSoftmax(0.5, symmetric),
        plan=plan,
        world=World(rank, rank, world_size, world_size, 0, torch.device("cpu"), None),
    )


def _trained(rank: int, world_size: int, plan: Plan, symmetric: bool) -> dict[str, Any]:
    session = _session(rank, world_size, plan, symmetric)
    # Batches of 4 and of 3: unequal shares, and with four ranks one of a rank that has nothing.
    batches = session.batches(_dataset(), 2, 4)
    losses = [float(session.step(batch)) for batch in batches]
    found = session.evaluate(_dataset(), {"accuracy": InBatchAccuracy()}, 4 if world_size == 4 else 12)
    return {"losses": losses, "found": found, "weights": session.state_dict()}


@pytest.mark.parametrize(
    ("axes", "symmetric"), [({"replicate": 2}, False), ({"shard": 2}, True), ({"replicate": 4}, False)]
)
def test_ranks_train_and_evaluate_as_one(axes: dict[str, int], symmetric: bool) -> None:
    plan = Plan(axes=Axes(**axes))
    batch = 4 if plan.world_size == 4 else 12
    alone = _session(0, 1, Plan(), symmetric)
    losses = [float(alone.step(one)) for one in alone.batches(_dataset(), 2, 4)]
    expected = alone.evaluate(_dataset(), {"accuracy": InBatchAccuracy()}, batch)
    for told in run_ranks(_trained, plan.world_size, plan, symmetric):
        assert told["losses"] == pytest.approx(losses, rel=1e-12)
        assert told["found"] == pytest.approx(expected, rel=1e-12)
        for name, weight in alone.state_dict().items():
            torch.testing.assert_close(told["weights"][name], weight, rtol=1e-12, atol=1e-14)


def test_without_the_others_it_would_be_another_loss() -> None:
    queries, documents, _ = _dataset().tensors
    together = InBatchSoftmax(0.5)((queries, documents), None)
    apart = sum(InBatchSoftmax(0.5)((queries[rows], documents[rows]), None) for rows in (slice(0, 4), slice(4, 7)))
    assert float(together) > float(apart)


def test_microbatches_are_refused() -> None:
    with pytest.raises(InputError, match=r"compares all samples of a global batch.*2 microbatches"):
        _session(0, 1, Plan(memory=Memory(accumulation=2)), False)


def test_what_the_model_must_give() -> None:
    with pytest.raises(InputError, match=r"\(3, 4\) and \(3, 5\): return \(queries, documents\)"):
        InBatchSoftmax()((torch.zeros(3, 4), torch.zeros(3, 5)), None)
    with pytest.raises(InputError, match="temperature is 0"):
        InBatchSoftmax(0)
