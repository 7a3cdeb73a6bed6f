"""A pipeline beside other choices of a plan: sharded stages, several data ranks, half precision, images with their
channels last, frozen weights."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.pipeline.stages import cut_stages
from meshwright.parallel.shard import finish, shard
from meshwright.plan import Plan
from meshwright.profile.structure.structure import structure
from tests.parallel.pipeline.test_pipeline import CPU, canonical, error, even_cuts, made, parts_of, total
from tests.ranks import RankPool


def plan_of(axes: dict[str, int], stages: int, found: Any, microbatches: int, **groups: Any) -> Plan:
    pipeline = {"microbatches": microbatches, "cuts": even_cuts(found, stages), **groups.pop("pipeline", {})}
    return Plan.model_validate({"axes": axes, "pipeline": pipeline, **groups})


def whole(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def sharded(rank: int, world: int, name: str, schedule: str, each: int, accumulation: int, sharding: str) -> float:
    """Pipeline × shard: every data rank has its own samples; gradients are the mean of theirs."""
    model, batch = made(name)
    alone, _ = made(name)
    found = structure(model, batch)
    memory = {"accumulation": accumulation, "sharding": sharding}
    plan = plan_of({"pipeline": 2, "shard": 2}, 2 * each, found, 2, pipeline={"schedule": schedule}, memory=memory)
    mesh = build_mesh(plan, "cpu", world)
    assert mesh is not None
    cutting = cut_stages(model, plan, found, mesh.get_local_rank("pipeline"), batch)
    for stage in cutting.stages:
        shard(stage, mesh, plan)
    pipeline = Pipeline(cutting, plan, mesh, CPU)
    mine = mesh.get_local_rank("shard")
    count = 2 * accumulation
    parts = parts_of(batch, [8 // (2 * count)] * (2 * count))
    errors = []
    for _ in range(2):
        alone.zero_grad()
        for parameter in cutting.module.parameters():
            parameter.grad = None
        pipeline.run(parts[mine * count : (mine + 1) * count], lambda _, output: total(output) * 2 / 8)
        for stage in cutting.stages:
            finish(stage)
        for example, _ in parts:
            (total(alone(*example.arguments, **example.keywords)) / 8).backward()
        right = {n: p.grad for n, p in alone.named_parameters()}
        largest = max(grad.abs().max().item() for grad in right.values() if grad is not None)
        for n, parameter in canonical(cutting):
            expected = right[n]
            assert parameter.grad is not None, n
            assert expected is not None, n
            errors.append(error(whole(parameter.grad), expected, 1e-6 * largest))
    return max(errors)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("schedule", "each", "accumulation", "sharding"),
    [
        ("gpipe", 1, 1, "parameters"),
        ("1f1b", 1, 2, "parameters"),
        ("1f1b", 1, 2, "optimizer"),
        ("interleaved_1f1b", 2, 2, "parameters"),
        ("zero_bubble", 2, 1, "parameters"),
        ("zbv", 2, 2, "optimizer"),
    ],
)
def test_sharded_stages(four: RankPool, schedule: str, each: int, accumulation: int, sharding: str) -> None:
    name = "tied" if each == 1 else "mlp"
    assert max(four.run(sharded, name, schedule, each, accumulation, sharding)) <= 1e-9


class Noting(nn.Module):
    """Notes the types and layouts of what it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: list[tuple[torch.dtype, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((x.dtype, x.is_contiguous(memory_format=torch.channels_last) if x.dim() == 4 else False))
        out: Tensor = self.inner(x)
        return out


def convolutions(channels_last: bool) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Noting(nn.Conv2d(4, 4, 3, padding=1)) for _ in range(4)))
    images = torch.randn(8, 4, 6, 6)
    if channels_last:
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, images


def as_it_is(rank: int, world: int, precision: str, channels_last: bool) -> tuple[list[Any], list[Any], float]:
    """What the modules of a stage see, beside what they see in the model alone."""
    model, images = convolutions(channels_last)
    alone, _ = convolutions(channels_last)
    batch = (images, torch.zeros(8))
    found = structure(model, batch)
    plan = plan_of({"pipeline": 2}, 2, found, 2, numerics={"precision": precision})
    mesh = build_mesh(plan, "cpu", world)
    assert mesh is not None
    cutting = cut_stages(model, plan, found, rank, batch)
    pipeline = Pipeline(cutting, plan, mesh, CPU)
    parts = parts_of(batch, [4, 4])
    pipeline.run(parts, lambda _, output: total(output))
    context = torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
    for example, _ in parts:
        with context:
            output = alone(*example.arguments)
        total(output.float()).backward()
    right = dict(alone.named_parameters())
    errors = []
    for name, parameter in cutting.module.named_parameters():
        expected = right[name].grad
        assert parameter.grad is not None
        assert expected is not None
        errors.append(error(parameter.grad, expected, 1e-6))
    held = {name: child for name, child in cutting.module.named_children() if isinstance(child, Noting)}
    theirs = [child.seen for name, child in alone.named_children() if name in held and isinstance(child, Noting)]
    return [child.seen for child in held.values()], theirs, max(errors)


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_types_and_layouts_survive_the_wire(two: RankPool, precision: str, channels_last: bool) -> None:
    for ours, theirs, worst in two.run(as_it_is, precision, channels_last):
        assert ours == theirs
        assert worst <= 1e-6


def frozen(rank: int, world: int, schedule: str) -> dict[str, bool]:
    """With all weights of the first stage frozen."""
    model, batch = made("mlp")
    found = structure(model, batch)
    plan = plan_of({"pipeline": 2}, 4 if schedule == "zbv" else 2, found, 2, pipeline={"schedule": schedule})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("3."))
    mesh = build_mesh(plan, "cpu", world)
    assert mesh is not None
    cutting = cut_stages(model, plan, found, rank, batch)
    Pipeline(cutting, plan, mesh, CPU).run(parts_of(batch, [4, 4]), lambda _, output: total(output))
    return {name: parameter.grad is not None for name, parameter in cutting.module.named_parameters()}


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "zbv"])
def test_frozen_weights_get_no_gradient(two: RankPool, schedule: str) -> None:
    together = {name: has for held in two.run(frozen, schedule) for name, has in held.items()}
    assert together == {name: name.startswith("3.") for name in together}


def untouched(rank: int, world: int) -> tuple[bool, list[int]]:
    """What a pipeline looks at before it runs leaves random numbers and statistics alone."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
    )
    batch = (torch.randn(8, 8), torch.zeros(8))
    found = structure(model, batch)
    plan = plan_of({"pipeline": 2}, 2, found, 2)
    mesh = build_mesh(plan, "cpu", world)
    assert mesh is not None
    cutting = cut_stages(model, plan, found, rank, batch)
    before = torch.get_rng_state()
    pipeline = Pipeline(cutting, plan, mesh, CPU)
    parts = parts_of(batch, [4, 4])
    pipeline._runner_for([example for example, _ in parts])
    same = torch.equal(before, torch.get_rng_state())
    pipeline.run(parts, lambda _, output: total(output))
    norms = [module for module in cutting.module.modules() if isinstance(module, nn.BatchNorm1d)]
    return same, [int(norm.num_batches_tracked or 0) for norm in norms]


def test_a_rehearsal_leaves_chance_and_statistics_alone(two: RankPool) -> None:
    for same, counts in two.run(untouched):
        assert same
        assert set(counts) == {2}
