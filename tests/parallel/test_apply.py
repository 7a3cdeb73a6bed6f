"""Applying a plan: what is wrapped, when gradients are averaged, and whose buffers count."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.blocks.convolutions import NnpackConvolution
from meshwright.model_io.batch import ModelBatch, at_least_fp32
from meshwright.parallel.apply import apply
from meshwright.plan import Plan
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def test_one_rank_runs_the_model_itself() -> None:
    model = nn.Linear(2, 2)
    parallel = apply(Plan(), model, CPU, 1)
    assert parallel.runner is model
    assert parallel.mesh is None


def test_a_plan_with_nnpack_replaces_the_kernels_of_convolutions() -> None:
    for kernels, is_replaced in (("default", False), ("nnpack", True)):
        model = nn.Sequential(nn.Conv2d(1, 2, 3))
        apply(Plan.model_validate({"compute": {"convolutions": kernels}}), model, CPU, 1)
        assert isinstance(model[0]._conv_forward, NnpackConvolution) == is_replaced


def test_half_precision_outputs_of_any_structure_become_fp32() -> None:
    half = torch.ones(2, dtype=torch.bfloat16)
    widened: Any = at_least_fp32({"a": half, "b": (half.half(), torch.ones(2).double(), torch.ones(2).long(), "text")})
    assert widened["a"].dtype == torch.float32
    assert [getattr(value, "dtype", None) for value in widened["b"]] == [
        torch.float32,
        torch.float64,
        torch.int64,
        None,
    ]


class ScaledSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sum()


def train_on_ranks(rank: int, size: int) -> dict[str, Any]:
    plan = Plan.model_validate({"axes": {"replicate": size}})
    model = ScaledSum()
    parallel = apply(plan, model, CPU, size)
    assert isinstance(parallel.runner, DistributedDataParallel)
    assert parallel.module is model
    count = model.get_buffer("count")
    gradients: list[float] = []
    example = ModelBatch((torch.full((3,), float(rank + 1)),), {}, None)

    def loss_of(number: int, output: Tensor) -> Tensor:
        if number:
            assert model.scale.grad is not None
            gradients.append(float(model.scale.grad[0]))
        return output

    parallel.run_microbatches([(example, 1), (example, 1)], lambda output, *_: output, loss_of)
    assert model.scale.grad is not None
    gradients.append(float(model.scale.grad[0]))
    count.fill_(float(rank + 1))
    parallel.align_buffers()
    return {"gradients": gradients, "count": float(count), "unused": model.unused.grad is None}


def test_gradients_are_averaged_in_the_last_microbatch_and_buffers_are_those_of_rank_0() -> None:
    results = run_ranks(train_on_ranks, 2)
    assert [result["gradients"] for result in results] == [[1.0, 3.0], [2.0, 3.0]]
    assert [result["count"] for result in results] == [1.0, 1.0]
    assert [result["unused"] for result in results] == [True, True]


def test_volumes_of_a_plan_with_channels_last_are_laid_out_like_it() -> None:
    model = nn.Sequential(nn.Conv3d(2, 4, 3), nn.Conv2d(2, 4, 2))
    apply(Plan.model_validate({"compute": {"layout": "channels_last"}}), model, CPU, 1)
    volume, image = model[0].weight, model[1].weight
    assert isinstance(volume, Tensor)
    assert isinstance(image, Tensor)
    assert volume.is_contiguous(memory_format=torch.channels_last_3d)
    assert image.is_contiguous(memory_format=torch.channels_last)
