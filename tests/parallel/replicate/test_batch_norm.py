"""Synchronized BatchNorm equals BatchNorm on the samples of all ranks together."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.blocks.recompute import recompute_blocks
from meshwright.parallel.replicate.batch_norm import synchronize_batch_norm
from tests.ranks import RankPool

SAMPLES = (3, 1, 4, 2)
CASES: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "rows": (nn.BatchNorm1d, (5,), {}),
    "sequences": (nn.BatchNorm1d, (5, 4), {"momentum": None}),
    "images": (nn.BatchNorm2d, (5, 4, 3), {}),
    "volumes": (nn.BatchNorm3d, (5, 2, 2, 2), {"affine": False}),
    "no running statistics": (nn.BatchNorm2d, (5, 2, 2), {"track_running_stats": False}),
    "other momentum and no bias": (nn.BatchNorm2d, (5, 2, 2), {"momentum": 0.3, "eps": 0.1}),
}


class Net(nn.Module):
    """A BatchNorm in a block between two parameters, so that gradients go through it."""

    def __init__(self, case: str) -> None:
        super().__init__()
        kind, shape, options = CASES[case]
        self.scale = nn.Parameter(torch.linspace(0.5, 2, shape[0]).view(-1, *[1] * (len(shape) - 1)))
        self.blocks = nn.ModuleList([nn.Sequential(kind(shape[0], **options), nn.Tanh(), nn.PReLU())])
        with torch.no_grad():
            for number, parameter in enumerate(self.blocks.parameters()):
                parameter.add_(torch.linspace(0.1, 0.9, parameter.numel()) * (number + 1))

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.scale).square() + 5
        for block in self.blocks:
            x = block(x)
        return (x * torch.arange(x[0].numel()).view(x[0].shape)).sum()


def batch(case: str, size: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = CASES[case][1]
    return [torch.randn(n, *shape, generator=generator, dtype=torch.float64) for n in SAMPLES[:size]]


Result = tuple[dict[str, Tensor], dict[str, Tensor], float, list[Tensor]]


def run(model: nn.Module, steps: list[Tensor], sum_over_ranks: Callable[[Tensor], None]) -> Result:
    inputs = [x.clone().requires_grad_() for x in steps]
    for x in inputs:
        model(x).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradient in gradients.values():
        sum_over_ranks(gradient)
    model.eval()
    evaluated = float(model(torch.ones_like(steps[0][:1])).detach())
    return dict(model.state_dict()), gradients, evaluated, [x.grad for x in inputs if x.grad is not None]


def synchronized(rank: int, size: int, case: str, recompute: bool) -> Result:
    model = Net(case).double()
    synchronize_batch_norm(model, dist.distributed_c10d._get_default_group())
    recompute_blocks(model, "full" if recompute else "none")
    return run(model, [batch(case, size, step)[rank] for step in range(2)], dist.all_reduce)


@pytest.mark.parametrize("case", CASES)
def test_synchronized_batch_norm_equals_batch_norm_on_all_samples(four: RankPool, two: RankPool, case: str) -> None:
    for pool, recompute in ((four, False), (two, True)):
        size = pool.world_size
        whole = [torch.cat(batch(case, size, step)) for step in range(2)]
        state, gradients, evaluated, inputs = run(Net(case).double(), whole, lambda gradient: None)
        for rank, result in enumerate(pool.run(synchronized, case, recompute)):
            torch.testing.assert_close(result[0], state, rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(result[1], gradients, rtol=1e-11, atol=1e-12)
            if case != "no running statistics":
                assert result[2] == pytest.approx(evaluated, rel=1e-12)
            begin = sum(SAMPLES[:rank])
            expected = [gradient[begin : begin + SAMPLES[rank]] for gradient in inputs]
            torch.testing.assert_close(result[3], expected, rtol=1e-11, atol=1e-12)


def normalize_images(rank: int, size: int) -> tuple[Tensor, Tensor, torch.dtype, bool]:
    """Normalizes bf16 images in channels_last with a large mean; the last rank has no samples."""
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(3)
    synchronize_batch_norm(layer, dist.distributed_c10d._get_default_group())
    images = (torch.randn(4, 3, 5, 5) + 100).to(torch.bfloat16).to(memory_format=torch.channels_last)
    local = images[:4] if rank == 0 else images[:0]
    out = layer(local.requires_grad_())
    out.float().square().sum().backward()
    is_channels_last = out.is_contiguous(memory_format=torch.channels_last)
    assert layer.running_mean is not None
    return out.detach().float(), layer.running_mean, out.dtype, is_channels_last


def test_bf16_channels_last_and_a_rank_without_samples(two: RankPool) -> None:
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(3)
    expected = layer((torch.randn(4, 3, 5, 5) + 100).to(torch.bfloat16).float())
    assert layer.running_mean is not None
    first, second = two.run(normalize_images)
    torch.testing.assert_close(first[0], expected.detach(), rtol=0.01, atol=0.01)
    assert first[2:] == (torch.bfloat16, True)
    assert second[0].shape == (0, 3, 5, 5)
    for result in (first, second):
        torch.testing.assert_close(result[1], layer.running_mean)
