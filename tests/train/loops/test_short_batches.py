"""BatchNorm in batches with fewer samples than ranks or microbatches, and `nn.SyncBatchNorm`, against plain PyTorch in
one process: samples that a rank borrows from another count neither in the loss nor in the statistics."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw
from tests.ranks import RankPool

BATCH, SIZE = 8, 18  # the last batch has 2 samples
STEPS = 6
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Net(nn.Module):
    """Two blocks with BatchNorm over `dims` dimensions of space, between linear layers."""

    def __init__(self, dims: int, norm: type[nn.Module] | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        kind = norm or NORMS[dims]
        self.blocks = nn.Sequential(
            nn.Sequential(CONVOLUTIONS[dims](3, 4, 1), kind(4), nn.Tanh()),
            nn.Sequential(CONVOLUTIONS[dims](4, 4, 1), kind(4, momentum=0.3), nn.Tanh()),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 2**dims, 5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x))
        return out


def data(dims: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SIZE, 3, *[2] * dims, generator=generator, dtype=torch.float64) * 3 + 1
    return x, torch.randn(SIZE, 5, generator=generator, dtype=torch.float64)


def batches(dims: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of two passes over the data."""
    x, y = data(dims)
    starts = range(0, SIZE, BATCH)
    return [(x[begin : begin + BATCH], y[begin : begin + BATCH]) for begin in (*starts, *starts)]


Result = tuple[list[float], dict[str, Tensor]]


def plain(dims: int, groups_of: dict[int, list[list[int]]] | None = None) -> Result:
    """Trains in one process. `groups_of` has, by the size of a batch, the positions that are normalized together;
    None for the whole batch."""
    model = Net(dims).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in batches(dims):
        optimizer.zero_grad()
        total = 0.0
        for positions in groups_of[len(x)] if groups_of else [list(range(len(x)))]:
            loss = F.mse_loss(model(x[positions]), y[positions]) * len(positions) / len(x)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, dict(model.state_dict())


def planned(rank: int, size: int, dims: int, plan: dict[str, Any], norm: Any = None, own_loop: bool = False) -> Result:
    model = Net(dims, norm).double()
    template = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = data(dims)
    session = mw.parallelize(
        model, template, loss=F.mse_loss, plan=plan, device="cpu", sample_batch=(x[:BATCH], y[:BATCH])
    )
    loader = session.prepare(DataLoader(TensorDataset(x, y), batch_size=BATCH))
    losses = []
    for _ in range(2):
        for batch in loader:
            if own_loop:
                session.optimizer.zero_grad()
                loss = session.forward(batch)
                session.backward(loss)
                session.optimizer.step()
            else:
                loss = session.step(batch)
            losses.append(float(loss.detach()))
    return losses, {name: value.clone() for name, value in session.state_dict().items()}


def assert_equal(results: list[Result], expected: Result) -> None:
    for losses, state in results:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(state, expected[1], rtol=1e-10, atol=1e-12)


SYNCHRONIZED = {"numerics": {"batch_norm": "synchronized"}}
REPLICATE = {"axes": {"replicate": 3}, **SYNCHRONIZED}


@pytest.mark.parametrize("dims", NORMS)
def test_synchronized_statistics_are_those_of_the_samples_that_count(three: RankPool, dims: int) -> None:
    assert_equal(three.run(planned, dims, REPLICATE), plain(dims))


@pytest.mark.parametrize(
    "plan",
    [
        {"axes": {"shard": 3}},
        {"axes": {"replicate": 3}, "memory": {"recompute": "full"}},
        {"axes": {"replicate": 3}, "shares": {"samples": [1, 4, 3]}},
    ],
    ids=["shard", "recompute", "shares"],
)
def test_under_other_plans(three: RankPool, plan: dict[str, Any]) -> None:
    assert_equal(three.run(planned, 2, {**plan, **SYNCHRONIZED}), plain(2))


def test_in_loops_that_call_backward(three: RankPool) -> None:
    assert_equal(three.run(planned, 2, REPLICATE, None, True), plain(2))


# Two data ranks with microbatches: number k of both is normalized together, and the batch of 2 samples has only one.
TWO_MICROBATCHES = {8: [[0, 1, 4, 5], [2, 3, 6, 7]], 2: [[0, 1]]}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_microbatches_without_samples(two: RankPool, four: RankPool, recompute: str) -> None:
    expected = plain(2, TWO_MICROBATCHES)
    memory = {"memory": {"accumulation": 2, "recompute": recompute}}
    assert_equal(two.run(planned, 2, {"axes": {"replicate": 2}, **memory, **SYNCHRONIZED}), expected)
    pipeline = {"axes": {"replicate": 2, "pipeline": 2}, "pipeline": {"microbatches": 2, "cuts": ["blocks.0.2"]}}
    assert_equal(four.run(planned, 2, {**pipeline, "memory": {"recompute": recompute}, **SYNCHRONIZED}), expected)


def test_a_pipeline_does_not_learn_from_a_repeated_microbatch(two: RankPool) -> None:
    groups = {8: [[0, 1], [2, 3], [4, 5], [6, 7]], 2: [[0], [1]]}
    plan = {"axes": {"pipeline": 2}, "pipeline": {"microbatches": 4, "cuts": ["blocks.0.2"]}}
    assert_equal(two.run(planned, 2, plan), plain(2, groups))


@pytest.mark.parametrize(
    "plan",
    [
        {"axes": {"replicate": 2}},
        {"axes": {"shard": 2}},
        {"axes": {"pipeline": 2}, "pipeline": {"schedule": "gpipe", "microbatches": 1, "cuts": ["blocks.0.2"]}},
    ],
    ids=["replicate", "shard", "pipeline"],
)
def test_sync_batch_norm_of_torch_on_cpu_ranks(two: RankPool, plan: dict[str, Any]) -> None:
    assert_equal(two.run(planned, 2, plan, nn.SyncBatchNorm), plain(2))


def test_sync_batch_norm_in_one_process() -> None:
    assert_equal([planned(0, 1, 2, {"axes": {"replicate": 1}}, nn.SyncBatchNorm)], plain(2))
