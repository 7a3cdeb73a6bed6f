"""Every sharding level trains as one process does, also weights that are used on some ranks or on none."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.blocks.recompute import recompute_blocks
from meshwright.errors import InputError
from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.replicate.replicate import align_buffers
from meshwright.parallel.shard import combining, reshard, shard
from meshwright.parallel.weights.state import full_gradients, full_state
from meshwright.plan import Plan
from tests.parallel.mixed import Trained, assert_same, batch, loss_of, mixed, optimizer_of, train_alone
from tests.ranks import RankPool
from tests.soaked import all_but


def plan_of(size: int, replicate: int = 1, sharding: str = "parameters", recompute: str = "none") -> Plan:
    return Plan.model_validate(
        {
            "axes": {"shard": size // replicate, "replicate": replicate},
            "memory": {"sharding": sharding, "recompute": recompute},
        }
    )


def divided(plan: Plan, size: int, units: bool = True) -> tuple[nn.Module, DeviceMesh]:
    model = mixed()
    mesh = build_mesh(plan, "cpu", size)
    assert mesh is not None
    recompute_blocks(model, plan.memory.recompute)
    shard(model, mesh, plan, units=units)
    return model, mesh


def train(rank: int, size: int, plan: Plan, microbatches: int, units: bool = True) -> Trained:
    model, mesh = divided(plan, size, units)
    optimizer = optimizer_of(model)
    for step in range(3):
        optimizer.zero_grad()
        for microbatch in range(microbatches):
            with combining(model, plan, microbatch == 0, microbatch == microbatches - 1):
                loss_of(model, batch(step, rank, microbatch)).backward()
        optimizer.step()
    align_buffers(model, mesh)
    return full_state(model, {}, mesh), full_gradients(model, {}, mesh)


@pytest.mark.parametrize("sharding", ["parameters", "gradients", "optimizer"])
@pytest.mark.parametrize("microbatches", all_but([3], [1, 3]))
def test_each_level_trains_as_one_process(two: RankPool, sharding: str, microbatches: int) -> None:
    expected = train_alone(3, 2, microbatches)
    for state, gradients in two.run(train, plan_of(2, sharding=sharding), microbatches):
        assert_same(state, expected[0])
        assert_same(gradients, expected[1])
    assert not any("never" in name for name in expected[1])


@pytest.mark.parametrize("sharding", ["parameters", "gradients", "optimizer"])
def test_beside_a_replicate_axis(four: RankPool, sharding: str) -> None:
    expected = train_alone(3, 4, 2)
    for state, gradients in four.run(train, plan_of(4, replicate=2, sharding=sharding), 2):
        assert_same(state, expected[0])
        assert_same(gradients, expected[1])


def test_more_ranks_than_rows_recompute_and_one_unit(four: RankPool) -> None:
    expected = train_alone(3, 4, 2)
    for plan, units in [(plan_of(4, recompute="full"), True), (plan_of(4), False)]:
        for state, gradients in four.run(train, plan, 2, units):
            assert_same(state, expected[0])
            assert_same(gradients, expected[1])


def bytes_held(rank: int, size: int, plan: Plan) -> list[tuple[int, int]]:
    """Of gathered weights and of gradients that are not divided, behind forward and behind backward of the first of
    two microbatches."""
    model, _ = divided(plan, size)
    found = []

    def look() -> None:
        gathered = [p for p in model.parameters() if not isinstance(p, DTensor) and p.dim()]
        found.append((len(gathered), sum(p.grad is not None for p in gathered)))

    for last in (False, True):
        with combining(model, plan, not last, last):
            loss = loss_of(model, batch(0, rank, int(last)))
            look()
            loss.backward()
            look()
    return found


def test_what_stays_gathered_is_what_the_level_says(two: RankPool) -> None:
    of = {
        level: two.run(bytes_held, plan_of(2, sharding=level))[0] for level in ("parameters", "gradients", "optimizer")
    }
    root, everything = of["parameters"][0][0], of["gradients"][0][0]
    assert 0 < root < everything, "blocks are freed behind their forward pass"
    assert of["parameters"] == [(root, 0), (0, 0), (root, 0), (0, 0)]
    assert of["gradients"] == [(everything, 0), (everything, 0), (everything, 0), (0, 0)]
    forward, first, again, end = of["optimizer"]
    assert (forward[0], first[0], again[0], end) == (everything, everything, everything, (0, 0))
    assert first[1] > 0, "gradients of the first microbatch are kept whole"


def evaluated(rank: int, size: int, plan: Plan) -> tuple[bool, bool, list[str]]:
    model, _ = divided(plan, size)
    with torch.no_grad():
        loss_of(model, batch(0, 0, 0))
    gathered = any(not isinstance(p, DTensor) for p in model.get_submodule("first").parameters())
    reshard(model)
    after = any(not isinstance(p, DTensor) for p in model.get_submodule("first").parameters())
    units = [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]
    return gathered, after, units


def test_evaluation_leaves_weights_gathered_until_they_are_freed(two: RankPool) -> None:
    gathered, after, units = two.run(evaluated, plan_of(2, sharding="gradients"))[0]
    assert (gathered, after) == (True, False)
    assert units == ["", "blocks.0", "blocks.1"], "a block with a weight tied to the outside goes with the rest"


def refused(rank: int, size: int) -> str:
    plan = Plan.model_validate(
        {"axes": {"shard": 2}, "modules": {"splits": {"head": {"kind": "column", "axis": "replicate"}}}}
    )
    try:
        divided(plan, size)
    except InputError as error:
        return str(error)
    return ""


def test_layers_split_over_the_replicate_axis_are_refused(two: RankPool) -> None:
    assert "plan.modules.splits.head splits a layer over the replicate axis" in two.run(refused)[0]


class TwoTypes(nn.Module):
    """A block of two dtypes, and a convolution whose weight does not lie row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 3).double()})])
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self.blocks[0]
        hidden = layers["b"](layers["a"](x).double()).float()
        out: Tensor = self.image(hidden[:, :, None, None].expand(-1, 3, 4, 4))
        return out.sum()


def two_types(rank: int, size: int, plan: Plan) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = TwoTypes()
    mesh = build_mesh(plan, "cpu", size)
    assert mesh is not None
    shard(model, mesh, plan)
    with combining(model, plan, True, True):
        model(torch.ones(2, 4) * (rank + 1)).backward()
    return full_gradients(model, {}, mesh)


def test_other_dtypes_and_layouts(two: RankPool) -> None:
    torch.manual_seed(0)
    model = TwoTypes()
    for rank in range(2):
        (model(torch.ones(2, 4) * (rank + 1)) / 2).backward()
    for gradients in two.run(two_types, plan_of(2)):
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            # All of them went through fp32, those of fp64 weights too.
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1.3e-6, atol=1e-6)
