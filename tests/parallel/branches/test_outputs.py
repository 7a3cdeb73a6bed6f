"""Ranks exchange the outputs of their branches: while the branches run, as nested values, and where one branch uses the
result of another."""

import math
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import default_collate

from meshwright.model_io.batch import split_batch
from meshwright.parallel.apply import apply
from meshwright.parallel.branches.branches import RemoteBranch
from meshwright.parallel.branches.pending import PendingTensor
from meshwright.plan import Plan
from tests.parallel.branches.branch_plans import BRANCHES, branch_plan
from tests.ranks import RankPool
from tests.zoo import ZOO, RandomSamples


class Barrier(torch.autograd.Function):
    """Waits, in the forward and in the backward pass, until all ranks have arrived."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        dist.barrier(group)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dist.barrier(ctx.group)
        return grads[0], None


def add_barrier(module: nn.Module, group: dist.ProcessGroup) -> None:
    module.register_forward_hook(
        lambda _, __, output: None if isinstance(output, FakeTensor) else Barrier.apply(output, group)
    )


def run_branches_with_barriers(rank: int, size: int, kind: str) -> tuple[str, float]:
    """Makes every branch wait in its middle until the branch of the other rank gets there, in both passes. Returns the
    outputs that rank 1 received, with whether each was complete, and the loss."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    model, data = ZOO[kind].model(), default_collate([RandomSamples(ZOO[kind].data)[i] for i in range(4)])
    parallel = apply(branch_plan(kind, {}), model, torch.device("cpu"), size, data)
    local_name = next(name for name, owner in BRANCHES[kind].items() if owner == rank)
    local_branch = parallel.module.get_submodule(local_name)
    add_barrier(next(m for m in local_branch.modules() if isinstance(m, nn.Linear)), group)
    received = []
    if rank:
        remote = parallel.module.get_submodule(next(iter(BRANCHES[kind])))
        assert isinstance(remote, RemoteBranch)
        remote.register_forward_hook(
            lambda _, __, output: received.append((type(output), output.broadcast.work.is_completed()))
        )
    loss = ZOO[kind].loss(parallel.module(*data[:-1]), data[-1])
    loss.backward()
    return str(received), float(loss)


@pytest.mark.parametrize("kind", BRANCHES)
def test_branches_run_at_the_same_time(two: RankPool, kind: str) -> None:
    (_, loss_0), (received, loss_1) = two.run(run_branches_with_barriers, kind)
    assert loss_0 == loss_1
    assert received == str([(PendingTensor, False)]), "rank 1 continues before rank 0 has a result"


class DictBranch(nn.Module):
    """Returns a dict, uses random numbers and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        out = self.norm(self.linear(x)) * scale
        return {"dropped": self.drop(out), "argmax": (out.detach().argmax(1), None), "transposed": out.t()}


class TwoDictBranches(nn.Module):
    """Two branches, followed by layers that all ranks run."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2))
        self.left, self.right = DictBranch(), DictBranch()
        self.last = nn.Sequential(nn.ReLU(True), nn.Dropout(0.2), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        shared = self.trunk(x)
        left, right = self.left(shared, scale=2.0), self.right(shared)
        left["dropped"] += 1  # in place
        index = (left["argmax"][0] + right["argmax"][0]).remainder(4)
        picked = right["transposed"].t().gather(1, index[:, None])
        out: Tensor = self.last(left["dropped"] + right["dropped"] * picked + shared)
        return out


def step_with_dict_branches(rank: int, size: int, branches: dict[str, int], training: bool) -> dict[str, Any]:
    torch.manual_seed(5)
    model = TwoDictBranches().double()
    x = torch.randn(8, 4, dtype=torch.float64)
    plan = Plan.model_validate(
        {"axes": {"tensor": size}, "modules": {"branches": branches, "splits": {"*.0": {"kind": "none"}}}}
    )
    parallel = apply(plan, model, torch.device("cpu"), size, (x, torch.zeros(8)))
    optimizer = torch.optim.SGD([{"params": list(parallel.parameters().values())}], lr=0.1)
    parallel.train(training)
    torch.manual_seed(7)
    out = parallel.module(x)
    out.square().sum().backward()
    norm = parallel.clip_(math.inf)  # clips nothing
    gradients = parallel.full_gradients()
    optimizer.step()
    return {"out": out.detach(), "gradients": gradients, "norm": norm, "state": parallel.full_state()}


def are_equal(left: Any, right: Any) -> bool:
    return all(torch.equal(left[key], right[key]) for key in left) and left.keys() == right.keys()


@pytest.mark.soak
@pytest.mark.parametrize("branches", [{"left": 0, "right": 1}, {"right": 1, "left": 1}])
def test_nested_outputs_and_random_numbers_are_the_same_on_all_ranks(two: RankPool, branches: dict[str, int]) -> None:
    first, second = two.run(step_with_dict_branches, branches, True)
    for key in ("gradients", "state"):
        assert are_equal(first[key], second[key])
    assert torch.equal(first["out"], second["out"])
    assert first["norm"] == second["norm"]
    assert list(first["state"]) == list(TwoDictBranches().state_dict())


def test_nested_outputs_without_random_numbers_are_those_of_the_unchanged_model(two: RankPool) -> None:
    torch.manual_seed(5)
    model = TwoDictBranches().double().eval()
    out = model(torch.randn(8, 4, dtype=torch.float64))
    out.square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.stack([g.square().sum() for g in expected.values() if g is not None]).sum().sqrt()
    for result in two.run(step_with_dict_branches, {"left": 0, "right": 1}, False):
        torch.testing.assert_close(result["out"], out.detach())
        torch.testing.assert_close(result["norm"], norm)
        for name, gradient in expected.items():
            torch.testing.assert_close(result["gradients"][name], gradient, msg=name)


class Double(torch.autograd.Function):
    """A user's autograd function, which does not pass through `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2


class Chain(nn.Module):
    """The second and the third branch use the result of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.side = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = Double.apply(self.second(first))
        third: Tensor = self.third(second)
        return Double.apply(third) + Double.apply(self.side(first))


def chain_step(rank: int, size: int, precision: str) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(5)
    model = Chain()
    x = torch.randn(8, 4)
    plan = Plan.model_validate(
        {
            "axes": {"tensor": size},
            "modules": {"branches": {"first": 0, "second": 1, "third": 0}, "splits": {"side": {"kind": "column"}}},
            "numerics": {"precision": precision},
        }
    )
    parallel = apply(plan, model, torch.device("cpu"), size, (x, torch.zeros(8)))
    outputs: list[Tensor] = []

    def sum_of_squares(_: int, output: Tensor) -> Tensor:
        outputs.append(output.detach())
        return output.square().sum()

    parallel.run_microbatches([(split_batch((x, x)), 8)], lambda output, *_: output, sum_of_squares)
    return outputs[0], parallel.full_gradients()


@pytest.mark.soak
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_branches_may_depend_on_each_other(two: RankPool, precision: str, tolerance: float) -> None:
    torch.manual_seed(5)
    model = Chain()
    out = model(torch.randn(8, 4))
    out.square().sum().backward()
    results = two.run(chain_step, precision)
    assert torch.equal(results[0][0], results[1][0])
    for output, gradients in results:
        torch.testing.assert_close(output, out.detach(), rtol=tolerance, atol=tolerance)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(
                gradients[name] / scale, parameter.grad / scale, rtol=0, atol=tolerance, msg=name
            )
