"""Experts of a list give the outputs and gradients of one device, also those that are called without rows."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.parallel.differentiable_collectives import AxisGroup
from meshwright.parallel.expert.listed import ListedExperts
from meshwright.parallel.expert.loads import ExpertLoads
from tests.ranks import RankPool

# The expert of each row, by rank: expert 1 gets rows of rank 1 only, expert 2 of nobody.
CHOICES = ([0, 0, 3], [1, 3, 0])


class EveryExpertCalled(nn.Module):
    """Calls each expert with the rows that chose it, also if there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 3), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor, choices: Tensor) -> Tensor:
        output = x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            rows = (choices == number).nonzero().flatten()
            output = output.index_add(0, rows, expert(x[rows]))
        return output


def output_and_gradient(module: nn.Module, rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).requires_grad_()
    output = module(x, torch.tensor(CHOICES[rank]))
    output.square().sum().backward()
    assert x.grad is not None
    return output.detach(), x.grad


def compare_with_one_device(rank: int, size: int) -> None:
    torch.manual_seed(0)
    plain, divided = EveryExpertCalled().double(), EveryExpertCalled().double()
    divided.load_state_dict(plain.state_dict())
    assert dist.group.WORLD is not None
    group = AxisGroup(dist.group.WORLD, rank, size, "expert")
    loads = ExpertLoads(group, dist.group.WORLD, torch.device("cpu"))
    listed = ListedExperts("layer", divided, list(divided.experts), group, loads)
    divided.forward = listed  # type: ignore[method-assign]
    expected = [output_and_gradient(plain, other) for other in range(size)]
    torch.testing.assert_close(output_and_gradient(divided, rank), expected[rank])
    for number in range(2 * rank, 2 * rank + 2):
        for weight, reference in zip(
            divided.experts[number].parameters(), plain.experts[number].parameters(), strict=True
        ):
            assert weight.grad is not None
            assert reference.grad is not None
            torch.testing.assert_close(weight.grad * size, reference.grad)


def test_an_expert_may_be_called_without_rows(two: RankPool) -> None:
    two.run(compare_with_one_device)
