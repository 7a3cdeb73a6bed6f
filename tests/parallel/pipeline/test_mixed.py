"""Pipelines together with other choices of a plan: sharded stages, several data ranks, half precision, channels-last
images, frozen weights."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.pipeline.pipeline import PipelineExecutor
from meshwright.parallel.pipeline.stages import cut_stages
from meshwright.parallel.shard import finish_step, shard
from meshwright.plan import Plan
from meshwright.profile.structure.structure import find_structure
from tests.parallel.pipeline.test_pipeline import (
    CPU,
    error,
    even_cuts,
    microbatches_of,
    model_and_batch,
    named_as_in_model,
    total,
)
from tests.ranks import RankPool


def plan_of(axes: dict[str, int], stages: int, model_structure: Any, microbatches: int, **groups: Any) -> Plan:
    pipeline = {"microbatches": microbatches, "cuts": even_cuts(model_structure, stages), **groups.pop("pipeline", {})}
    return Plan.model_validate({"axes": axes, "pipeline": pipeline, **groups})


def whole(tensor: Tensor) -> Tensor:
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def train_sharded(
    rank: int, world: int, name: str, schedule: str, each: int, accumulation: int, sharding: str
) -> float:
    """Pipeline × shard: every data rank has its own samples, and gradients are the mean over the data ranks. Returns
    the largest relative error of a gradient."""
    model, batch = model_and_batch(name)
    unsplit, _ = model_and_batch(name)
    model_structure = find_structure(model, batch)
    memory = {"accumulation": accumulation, "sharding": sharding}
    plan = plan_of(
        {"pipeline": 2, "shard": 2}, 2 * each, model_structure, 2, pipeline={"schedule": schedule}, memory=memory
    )
    mesh = build_mesh(plan, "cpu", world)
    assert mesh is not None
    local_stages = cut_stages(model, plan, model_structure, mesh.get_local_rank("pipeline"), batch)
    for stage in local_stages.stages:
        shard(stage, mesh, plan)
    pipeline = PipelineExecutor(local_stages, plan, mesh, CPU)
    data_rank = mesh.get_local_rank("shard")
    count = 2 * accumulation
    parts = microbatches_of(batch, [8 // (2 * count)] * (2 * count))
    errors = []
    for _ in range(2):
        unsplit.zero_grad()
        for parameter in local_stages.module.parameters():
            parameter.grad = None
        pipeline.run(parts[data_rank * count : (data_rank + 1) * count], lambda _, output: total(output) * 2 / 8)
        for stage in local_stages.stages:
            finish_step(stage)
        for example, _ in parts:
            (total(unsplit(*example.arguments, **example.keywords)) / 8).backward()
        right = {n: p.grad for n, p in unsplit.named_parameters()}
        largest = max(grad.abs().max().item() for grad in right.values() if grad is not None)
        for n, parameter in named_as_in_model(local_stages):
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
def test_sharded_stages_train_as_one_process(
    four: RankPool, schedule: str, each: int, accumulation: int, sharding: str
) -> None:
    name = "tied" if each == 1 else "mlp"
    assert max(four.run(train_sharded, name, schedule, each, accumulation, sharding)) <= 1e-9


class InputRecorder(nn.Module):
    """Records the types and memory layouts of its inputs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.inputs: list[tuple[torch.dtype, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append((x.dtype, x.is_contiguous(memory_format=torch.channels_last) if x.dim() == 4 else False))
        out: Tensor = self.inner(x)
        return out


def convolutions(channels_last: bool) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(InputRecorder(nn.Conv2d(4, 4, 3, padding=1)) for _ in range(4)))
    images = torch.randn(8, 4, 6, 6)
    if channels_last:
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, images


def record_inputs(rank: int, world: int, precision: str, channels_last: bool) -> tuple[list[Any], list[Any], float]:
    """The inputs of this rank's modules in the pipeline and in one process, and the largest error of a gradient."""
    model, images = convolutions(channels_last)
    unsplit, _ = convolutions(channels_last)
    batch = (images, torch.zeros(8))
    model_structure = find_structure(model, batch)
    plan = plan_of({"pipeline": 2}, 2, model_structure, 2, numerics={"precision": precision})
    mesh = build_mesh(plan, "cpu", world)
    assert mesh is not None
    local_stages = cut_stages(model, plan, model_structure, rank, batch)
    pipeline = PipelineExecutor(local_stages, plan, mesh, CPU)
    parts = microbatches_of(batch, [4, 4])
    pipeline.run(parts, lambda _, output: total(output))
    context = torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
    for example, _ in parts:
        with context:
            output = unsplit(*example.arguments)
        total(output.float()).backward()
    right = dict(unsplit.named_parameters())
    errors = []
    for name, parameter in local_stages.module.named_parameters():
        expected = right[name].grad
        assert parameter.grad is not None
        assert expected is not None
        errors.append(error(parameter.grad, expected, 1e-6))
    local_children = {
        name: child for name, child in local_stages.module.named_children() if isinstance(child, InputRecorder)
    }
    theirs = [
        child.inputs
        for name, child in unsplit.named_children()
        if name in local_children and isinstance(child, InputRecorder)
    ]
    return [child.inputs for child in local_children.values()], theirs, max(errors)


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_types_and_memory_layouts_are_the_same_behind_a_cut(two: RankPool, precision: str, channels_last: bool) -> None:
    for ours, theirs, worst in two.run(record_inputs, precision, channels_last):
        assert ours == theirs
        assert worst <= 1e-6


def train_frozen(rank: int, world: int, schedule: str) -> dict[str, bool]:
    """Trains with all weights but those of the last module frozen. Returns which parameters have a gradient."""
    model, batch = model_and_batch("mlp")
    model_structure = find_structure(model, batch)
    plan = plan_of({"pipeline": 2}, 4 if schedule == "zbv" else 2, model_structure, 2, pipeline={"schedule": schedule})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("3."))
    mesh = build_mesh(plan, "cpu", world)
    assert mesh is not None
    local_stages = cut_stages(model, plan, model_structure, rank, batch)
    PipelineExecutor(local_stages, plan, mesh, CPU).run(microbatches_of(batch, [4, 4]), lambda _, output: total(output))
    return {name: parameter.grad is not None for name, parameter in local_stages.module.named_parameters()}


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "zbv"])
def test_frozen_weights_get_no_gradient(two: RankPool, schedule: str) -> None:
    has_gradient = {name: has for of_rank in two.run(train_frozen, schedule) for name, has in of_rank.items()}
    assert has_gradient == {name: name.startswith("3.") for name in has_gradient}


def infer_shapes_and_train(rank: int, world: int) -> tuple[bool, list[int]]:
    """Returns whether shape inference leaves the random state alone, and how many batches each BatchNorm counted."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
    )
    batch = (torch.randn(8, 8), torch.zeros(8))
    model_structure = find_structure(model, batch)
    plan = plan_of({"pipeline": 2}, 2, model_structure, 2)
    mesh = build_mesh(plan, "cpu", world)
    assert mesh is not None
    local_stages = cut_stages(model, plan, model_structure, rank, batch)
    before = torch.get_rng_state()
    pipeline = PipelineExecutor(local_stages, plan, mesh, CPU)
    parts = microbatches_of(batch, [4, 4])
    pipeline._runner_for([example for example, _ in parts])
    same = torch.equal(before, torch.get_rng_state())
    pipeline.run(parts, lambda _, output: total(output))
    norms = [module for module in local_stages.module.modules() if isinstance(module, nn.BatchNorm1d)]
    return same, [int(norm.num_batches_tracked or 0) for norm in norms]


def test_shape_inference_changes_neither_random_state_nor_statistics(two: RankPool) -> None:
    for same, counts in two.run(infer_shapes_and_train):
        assert same
        assert set(counts) == {2}
