"""Shards in proportion to `shares.shards`: each rank holds its part of weights and optimizer state and no padding, and
trains the same model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import meshwright as mw
from meshwright.errors import InputError
from meshwright.parallel.torch_private import fsdp_parameter_groups
from meshwright.parallel.weights import torch_private
from meshwright.parallel.weights.layout import gather_parameter, local_tensor
from meshwright.plan import Plan
from meshwright.plan_fields.shares import share_sizes
from meshwright.train.session import Session
from meshwright.train.shares.check import check_optimizer
from tests.parallel.mixed import assert_equal_tensors, train_in_one_process
from tests.parallel.test_shard import train
from tests.parallel.zoo_sessions import check_checkpoints_move
from tests.ranks import RankPool
from tests.soaked import all_but


def plan_of(shards: tuple[int, ...], sharding: str = "parameters", **groups: Any) -> Plan:
    axes = {"shard": len(shards), **groups.pop("axes", {})}
    return Plan.model_validate({"axes": axes, "memory": {"sharding": sharding}, "shares": {"shards": shards}, **groups})


LEVELS = ("parameters", "gradients", "optimizer")
PLANS = [plan_of(shards, level) for level in LEVELS for shards in ((1, 3), (2, 5, 1))]


@pytest.mark.parametrize("plan", all_but([PLANS[0], PLANS[3]], PLANS), ids=Plan.summary)
def test_unused_frozen_and_tied_weights_train_as_in_one_process(two: RankPool, three: RankPool, plan: Plan) -> None:
    ranks = plan.world_size
    expected = train_in_one_process(3, ranks, 2)
    for state, gradients in (two if ranks == 2 else three).run(train, plan, 2):
        assert_equal_tensors(state, expected[0])
        assert_equal_tensors(gradients, expected[1])


@pytest.mark.soak
@pytest.mark.parametrize("level", LEVELS)
def test_they_combine_with_a_replicate_axis(four: RankPool, level: str) -> None:
    expected = train_in_one_process(3, 4, 2)
    plan = plan_of((1, 3), level, axes={"replicate": 2})
    for state, gradients in four.run(train, plan, 2):
        assert_equal_tensors(state, expected[0])
        assert_equal_tensors(gradients, expected[1])


SIZES = (48, 6)  # the width of layers, and that of the last one
# Shards of these sizes fill the vectors of the CPU. Elements that do not, torch's fused kernels round in another way.
SIZES_OF_VECTORS = (64, 64)


def session_of(plan: Plan, sizes: tuple[int, int] = SIZES) -> Session:
    torch.manual_seed(0)
    width, last = sizes
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)), nn.Linear(width, last)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return mw.parallelize(model, optimizer, loss=nn.functional.mse_loss, plan=plan, clip_norm=0.1)


def batch_of(seed: int, sizes: tuple[int, int] = SIZES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randn(12, size, generator=generator) for size in sizes)
    return inputs, targets


def memory_bytes(tensors: list[Tensor]) -> int:
    """The memory that keeps these tensors alive, with that of tensors which share it."""
    storages = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def train_and_measure(
    rank: int, size: int, plan: Plan, sizes: tuple[int, int] = SIZES
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The weights after three steps, and the bytes of weights, gradients and optimizer state of this rank."""
    session = session_of(plan, sizes)
    for step in range(3):
        session.step(batch_of(10 * step + rank, sizes))
    weights: list[Tensor] = [parameter for parameter in session.module.parameters() if isinstance(parameter, DTensor)]
    gradients = [parameter.grad for parameter in weights if parameter.grad is not None]
    states = [value for state in session.optimizer.state.values() for value in state.values() if value.dim()]
    held: dict[str, list[Tensor]] = {"weights": weights, "gradients": gradients, "optimizer": states}
    return session.state_dict(), {kind: memory_bytes(tensors) for kind, tensors in held.items()}


@pytest.mark.parametrize("level", all_but({"parameters"}, LEVELS))
def test_a_rank_holds_bytes_in_its_proportion_and_no_padding(two: RankPool, level: str) -> None:
    """With two ranks, whose sums have one order, the weights are those of even shards to the last bit."""
    results = two.run(train_and_measure, plan_of((1, 3), level))
    shapes = [parameter.shape for parameter in session_of(Plan()).module.parameters()]
    for rank, (_, held) in enumerate(results):
        rows = [share_sizes(shape[0], (1, 3))[rank] for shape in shapes]
        needed = 4 * sum(row * shape[1:].numel() for row, shape in zip(rows, shapes, strict=True))
        assert held == {"weights": needed, "gradients": needed, "optimizer": 2 * needed}
    assert results[1][1]["optimizer"] / results[0][1]["optimizer"] == pytest.approx(3, rel=0.05)
    even = two.run(train_and_measure, Plan.model_validate({"axes": {"shard": 2}, "memory": {"sharding": level}}))
    assert results[0][0].keys() == even[0][0].keys()
    assert all(torch.equal(value, even[0][0][name]) for name, value in results[0][0].items())


PRECISIONS: list[dict[str, Any]] = [
    {"numerics": {"precision": "bf16", "cast": "weights"}},
    {"numerics": {"precision": "bf16"}},
    {"numerics": {"precision": "fp16", "cast": "weights"}},
    {"numerics": {"precision": "bf16", "cast": "weights"}, "gradients": {"precision": "bf16"}},
    {"compute": {"fused_optimizer": True}},
    {"memory": {"recompute": "full", "accumulation": 2}},
]


@pytest.mark.parametrize("groups", all_but(PRECISIONS[:1], PRECISIONS), ids=str)
def test_mixed_precision_equals_that_of_even_shards(two: RankPool, groups: dict[str, Any]) -> None:
    proportional = {"axes": {"shard": 2}, "shares": {"shards": [3, 1]}, **groups}
    sizes = SIZES_OF_VECTORS if "compute" in groups else SIZES
    states = two.run(train_and_measure, Plan.model_validate(proportional), sizes)
    even = two.run(train_and_measure, Plan.model_validate({"axes": {"shard": 2}, **groups}), sizes)
    assert all(torch.equal(value, even[0][0][name]) for name, value in states[0][0].items())


@pytest.mark.parametrize("kind", all_but({"mnist"}, ("mnist", "gpt")))
def test_checkpoints_move_to_even_shards_and_other_proportions(two: RankPool, kind: str, tmp_path: Path) -> None:
    plan, other, even = plan_of((1, 3)), plan_of((5, 2), "gradients"), Plan.model_validate({"axes": {"shard": 2}})
    for number, (first, second) in enumerate(((plan, other), (plan, even), (even, plan))[: 3 if kind == "gpt" else 1]):
        (tmp_path / str(number)).mkdir()
        check_checkpoints_move(two, kind, first, second, tmp_path / str(number))


def gather_zeros(rank: int, size: int) -> bool:
    """New tensors that torch makes from a parameter are divided as the parameter is, also if a model with even shards
    has made such tensors before."""
    same = []
    for plan in (Plan.model_validate({"axes": {"shard": 2}}), plan_of((1, 3)), plan_of((2, 1))):
        weight = next(session_of(plan).module.parameters())
        doubled = torch.zeros_like(weight).add(weight, alpha=2.0)
        same.append(torch.equal(gather_parameter(doubled, None, None), 2 * gather_parameter(weight, None, None)))
    return all(same)


def test_new_tensors_keep_the_proportions(two: RankPool) -> None:
    assert all(two.run(gather_zeros))


def refused_torch(rank: int, size: int) -> str:
    unit = session_of(Plan.model_validate({"axes": {"shard": 2}})).module
    assert isinstance(unit, FSDPModule)
    parameter = fsdp_parameter_groups(unit)[0].fsdp_params[0]
    del parameter.sharded_size
    with pytest.raises(InputError) as error:
        torch_private.divide_in_proportion([parameter], {})
    return str(error.value)


def test_another_fsdp2_is_refused_in_words(two: RankPool) -> None:
    (message, _) = two.run(refused_torch)
    assert message == (
        f"plan.shares.shards changes how FSDP2 divides weights, but FSDPParam of torch {torch.__version__} has no"
        " sharded_size: leave shares.shards out, or use torch 2.11 or 2.13"
    )


def test_an_optimizer_that_looks_at_several_rows_is_refused() -> None:
    optimizer = torch.optim.Adafactor([nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(InputError, match=r"shares.shards is \[1, 3\], .* but Adafactor is not known to do that"):
        check_optimizer(plan_of((1, 3)), optimizer)
    check_optimizer(plan_of((2, 2)), optimizer)
