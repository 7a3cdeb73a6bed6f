"""Every sharding level trains as one process does, also weights that are used on some ranks or on none."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.blocks.recompute import recompute_blocks
from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.replicate.replicate import broadcast_buffers
from meshwright.parallel.shard import gradient_synchronization, reshard, shard
from meshwright.parallel.weights.state import full_gradients, full_state
from meshwright.plan import Plan
from tests.parallel.mixed import (
    StateAndGradients,
    assert_equal_tensors,
    batch,
    loss_of,
    mixed,
    optimizer_of,
    train_in_one_process,
)
from tests.ranks import RankPool
from tests.soaked import all_but


def plan_of(size: int, replicate: int = 1, sharding: str = "parameters", recompute: str = "none") -> Plan:
    return Plan.model_validate(
        {
            "axes": {"shard": size // replicate, "replicate": replicate},
            "memory": {"sharding": sharding, "recompute": recompute},
        }
    )


def shard_mixed(plan: Plan, size: int, per_block: bool = True) -> tuple[nn.Module, DeviceMesh]:
    model = mixed()
    mesh = build_mesh(plan, "cpu", size)
    assert mesh is not None
    recompute_blocks(model, plan.memory.recompute)
    shard(model, mesh, plan, per_block=per_block)
    return model, mesh


def train(rank: int, size: int, plan: Plan, microbatches: int, per_block: bool = True) -> StateAndGradients:
    model, mesh = shard_mixed(plan, size, per_block)
    optimizer = optimizer_of(model)
    for step in range(3):
        optimizer.zero_grad()
        for microbatch in range(microbatches):
            with gradient_synchronization(model, plan, microbatch == 0, microbatch == microbatches - 1):
                loss_of(model, batch(step, rank, microbatch)).backward()
        optimizer.step()
    broadcast_buffers(model, mesh)
    return full_state(model, {}, mesh), full_gradients(model, {}, mesh)


@pytest.mark.parametrize("sharding", ["parameters", "gradients", "optimizer"])
@pytest.mark.parametrize("microbatches", all_but([3], [1, 3]))
def test_each_level_trains_as_one_process(two: RankPool, sharding: str, microbatches: int) -> None:
    expected = train_in_one_process(3, 2, microbatches)
    for state, gradients in two.run(train, plan_of(2, sharding=sharding), microbatches):
        assert_equal_tensors(state, expected[0])
        assert_equal_tensors(gradients, expected[1])
    assert not any("never" in name for name in expected[1])


@pytest.mark.parametrize("sharding", all_but({"parameters"}, ["parameters", "gradients", "optimizer"]))
def test_sharding_combines_with_a_replicate_axis(four: RankPool, sharding: str) -> None:
    expected = train_in_one_process(3, 4, 2)
    for state, gradients in four.run(train, plan_of(4, replicate=2, sharding=sharding), 2):
        assert_equal_tensors(state, expected[0])
        assert_equal_tensors(gradients, expected[1])


def test_more_ranks_than_rows_recomputation_and_a_single_unit_train_the_same(four: RankPool) -> None:
    expected = train_in_one_process(3, 4, 2)
    for plan, per_block in [(plan_of(4, recompute="full"), True), (plan_of(4), False)]:
        for state, gradients in four.run(train, plan, 2, per_block):
            assert_equal_tensors(state, expected[0])
            assert_equal_tensors(gradients, expected[1])


def gathered_counts(rank: int, size: int, plan: Plan) -> list[tuple[int, int]]:
    """The number of gathered weights and of full gradients, after the forward and after the backward pass of each of
    two microbatches."""
    model, _ = shard_mixed(plan, size)
    counts = []

    def count() -> None:
        gathered = [p for p in model.parameters() if not isinstance(p, DTensor) and p.dim()]
        counts.append((len(gathered), sum(p.grad is not None for p in gathered)))

    for last in (False, True):
        with gradient_synchronization(model, plan, not last, last):
            loss = loss_of(model, batch(0, rank, int(last)))
            count()
            loss.backward()
            count()
    return counts


def test_each_level_keeps_its_weights_and_gradients_gathered(two: RankPool) -> None:
    counts = {
        level: two.run(gathered_counts, plan_of(2, sharding=level))[0]
        for level in ("parameters", "gradients", "optimizer")
    }
    root, everything = counts["parameters"][0][0], counts["gradients"][0][0]
    assert 0 < root < everything, "blocks are freed after their forward pass"
    assert counts["parameters"] == [(root, 0), (0, 0), (root, 0), (0, 0)]
    assert counts["gradients"] == [(everything, 0), (everything, 0), (everything, 0), (0, 0)]
    forward_1, backward_1, forward_2, backward_2 = counts["optimizer"]
    assert (forward_1[0], backward_1[0], forward_2[0]) == (everything, everything, everything)
    assert backward_2 == (0, 0)
    assert backward_1[1] > 0, "gradients of the first microbatch stay gathered"


def evaluate_and_reshard(rank: int, size: int, plan: Plan) -> tuple[bool, bool, list[str]]:
    model, _ = shard_mixed(plan, size)
    with torch.no_grad():
        loss_of(model, batch(0, 0, 0))
    gathered = any(not isinstance(p, DTensor) for p in model.get_submodule("first").parameters())
    reshard(model)
    gathered_after = any(not isinstance(p, DTensor) for p in model.get_submodule("first").parameters())
    units = [name for name, child in model.named_modules() if isinstance(child, FSDPModule)]
    return gathered, gathered_after, units


def test_evaluation_leaves_weights_gathered_until_reshard(two: RankPool) -> None:
    gathered, gathered_after, units = two.run(evaluate_and_reshard, plan_of(2, sharding="gradients"))[0]
    assert (gathered, gathered_after) == (True, False)
    assert units == ["", "blocks.0", "blocks.1"], "a block with a weight tied to the outside is part of the root unit"


class TwoDtypes(nn.Module):
    """A block of two dtypes, and a convolution whose weight is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 3).double()})])
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self.blocks[0]
        hidden = layers["b"](layers["a"](x).double()).float()
        out: Tensor = self.image(hidden[:, :, None, None].expand(-1, 3, 4, 4))
        return out.sum()


def gradients_of_two_dtypes(rank: int, size: int, plan: Plan) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = TwoDtypes()
    mesh = build_mesh(plan, "cpu", size)
    assert mesh is not None
    shard(model, mesh, plan)
    with gradient_synchronization(model, plan, True, True):
        model(torch.ones(2, 4) * (rank + 1)).backward()
    return full_gradients(model, {}, mesh)


def test_several_dtypes_and_non_contiguous_weights(two: RankPool) -> None:
    torch.manual_seed(0)
    model = TwoDtypes()
    for rank in range(2):
        (model(torch.ones(2, 4) * (rank + 1)) / 2).backward()
    for gradients in two.run(gradients_of_two_dtypes, plan_of(2)):
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            # All gradients are reduced in fp32, also those of fp64 weights.
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1.3e-6, atol=1e-6)


class Differentiating(nn.Module):
    """Returns the derivative of its blocks' output by the input, and calls a block again after differentiating."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = x
        for block in self.blocks:
            y = block(y)
        (derivative,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        result: Tensor = derivative + self.blocks[0](derivative)
        return result


def differentiating() -> nn.Module:
    torch.manual_seed(0)
    return Differentiating().double()


def gradients_of_derivative(rank: int, size: int, plan: Plan) -> dict[str, Tensor]:
    model, mesh = differentiating(), build_mesh(plan, "cpu", size)
    assert mesh is not None
    recompute_blocks(model, plan.memory.recompute)
    shard(model, mesh, plan)
    for _ in range(2):
        model.zero_grad()
        with gradient_synchronization(model, plan, True, True):
            model(derivative_inputs()[rank]).square().sum().backward()
    return full_gradients(model, {}, mesh)


def derivative_inputs() -> Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("sharding", ["parameters", "optimizer"])
def test_a_model_may_differentiate_its_output_in_the_forward_pass(two: RankPool, sharding: str, recompute: str) -> None:
    model = differentiating()
    sum(model(inputs).square().sum() for inputs in derivative_inputs()).div(2).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradients in two.run(gradients_of_derivative, plan_of(2, sharding=sharding, recompute=recompute)):
        assert_equal_tensors(gradients, expected)
