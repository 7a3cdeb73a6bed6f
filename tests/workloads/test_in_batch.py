"""In-batch softmax: loss, gradients and evaluation on several ranks are the same as on one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes, Memory
from meshwright.processes.world import World
from meshwright.train.session import Session
from meshwright.workloads.in_batch import InBatchAccuracy, InBatchSoftmax
from tests.ranks import run_ranks

SAMPLES = 7  # not divisible by two or four ranks


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


def _train_and_evaluate(rank: int, world_size: int, plan: Plan, symmetric: bool) -> dict[str, Any]:
    session = _session(rank, world_size, plan, symmetric)
    # Batches of 4 and of 3 samples: ranks get unequal shares, and with four ranks one gets no sample of the second.
    batches = session.batches(_dataset(), 2, 4)
    losses = [float(session.step(batch)) for batch in batches]
    metrics = session.evaluate(_dataset(), {"accuracy": InBatchAccuracy()}, 4 if world_size == 4 else 12)
    return {"losses": losses, "metrics": metrics, "weights": session.state_dict()}


@pytest.mark.parametrize(
    ("axes", "symmetric"), [({"replicate": 2}, False), ({"shard": 2}, True), ({"replicate": 4}, False)]
)
def test_ranks_train_and_evaluate_as_one_device_does(axes: dict[str, int], symmetric: bool) -> None:
    plan = Plan(axes=Axes(**axes))
    batch = 4 if plan.world_size == 4 else 12
    alone = _session(0, 1, Plan(), symmetric)
    losses = [float(alone.step(global_batch)) for global_batch in alone.batches(_dataset(), 2, 4)]
    expected = alone.evaluate(_dataset(), {"accuracy": InBatchAccuracy()}, batch)
    for result in run_ranks(_train_and_evaluate, plan.world_size, plan, symmetric):
        assert result["losses"] == pytest.approx(losses, rel=1e-12)
        assert result["metrics"] == pytest.approx(expected, rel=1e-12)
        for name, weight in alone.state_dict().items():
            torch.testing.assert_close(result["weights"][name], weight, rtol=1e-12, atol=1e-14)


def test_the_loss_over_all_samples_differs_from_the_sum_over_parts() -> None:
    queries, documents, _ = _dataset().tensors
    together = InBatchSoftmax(0.5)((queries, documents), None)
    in_parts = sum(InBatchSoftmax(0.5)((queries[rows], documents[rows]), None) for rows in (slice(0, 4), slice(4, 7)))
    assert float(together) > float(in_parts)


def test_plans_with_microbatches_are_refused() -> None:
    with pytest.raises(InputError, match=r"compares all samples of a global batch.*2 microbatches"):
        _session(0, 1, Plan(memory=Memory(accumulation=2)), False)


def test_a_wrong_model_output_or_temperature_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"\(3, 4\) and \(3, 5\): return \(queries, documents\)"):
        InBatchSoftmax()((torch.zeros(3, 4), torch.zeros(3, 5)), None)
    with pytest.raises(InputError, match="temperature is 0"):
        InBatchSoftmax(0)
