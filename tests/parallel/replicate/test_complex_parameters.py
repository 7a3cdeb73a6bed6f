"""Gradients of complex parameters are averaged as those of real ones, in every precision and beside every axis."""

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from tests.ranks import RankPool


class Spectrum(nn.Module):
    """A filter of complex numbers, and a layer of real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)))
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fft.irfft(torch.fft.rfft(self.blocks[0](x)) * self.filter, n=8)
        return self.blocks[1](x)


def trained(plan: dict[str, object], first: int, last: int) -> Tensor:
    torch.manual_seed(0)
    model = Spectrum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.functional.mse_loss
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    session = mw.parallelize(
        model, optimizer, loss=loss, plan=plan, sample_batch=(x, x.flip(1)), device="cpu", check=False
    )
    for _ in range(2):  # a loop with a backward pass of its own, whose gradients DDP does not average
        session.optimizer.zero_grad()
        session.backward(session.forward((x[first:last], x.flip(1)[first:last])))
        session.optimizer.step()
    return session.state_dict()["filter"].clone()


def train_rank(rank: int, size: int, plan: dict[str, object]) -> Tensor:
    return trained(plan, 4 * rank, 4 * rank + 4)


@pytest.mark.parametrize("algorithm", ["native", "ring", "shared_memory"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_complex_gradients_are_averaged(two: RankPool, algorithm: str, precision: str) -> None:
    expected = trained({}, 0, 8)
    plan = {"axes": {"replicate": 2}, "gradients": {"algorithm": algorithm, "precision": precision}}
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    for found in two.run(train_rank, plan):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
