"""A plan on a model: what it refuses, and what it leaves alone."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.batch import Example, at_least_fp32
from meshwright.parallel.apply import apply
from meshwright.plan import Plan
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def test_one_rank_runs_the_model_itself() -> None:
    model = nn.Linear(2, 2)
    parallel = apply(Plan(), model, CPU, 1)
    assert parallel.runner is model
    assert parallel.mesh is None


def test_outputs_of_any_structure_are_widened() -> None:
    half = torch.ones(2, dtype=torch.bfloat16)
    widened: Any = at_least_fp32({"a": half, "b": (half.half(), torch.ones(2).double(), torch.ones(2).long(), "text")})
    assert widened["a"].dtype == torch.float32
    assert [getattr(value, "dtype", None) for value in widened["b"]] == [
        torch.float32,
        torch.float64,
        torch.int64,
        None,
    ]


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sum()


def on_ranks(rank: int, size: int) -> dict[str, Any]:
    plan = Plan.model_validate({"axes": {"replicate": size}})
    model = Summed()
    parallel = apply(plan, model, CPU, size)
    assert isinstance(parallel.runner, DistributedDataParallel)
    assert parallel.module is model
    seen = model.get_buffer("seen")
    first: list[float] = []
    example = Example((torch.full((3,), float(rank + 1)),), {}, None)

    def loss_of(number: int, output: Tensor) -> Tensor:
        if number:
            assert model.scale.grad is not None
            first.append(float(model.scale.grad[0]))
        return output

    parallel.run([(example, 1), (example, 1)], loss_of)
    assert model.scale.grad is not None
    first.append(float(model.scale.grad[0]))
    seen.fill_(float(rank + 1))
    parallel.align_buffers()
    return {"gradients": first, "seen": float(seen), "unused": model.unused.grad is None}


def test_ranks_combine_in_the_last_microbatch_and_share_rank_0s_buffers() -> None:
    results = run_ranks(on_ranks, 2)
    assert [result["gradients"] for result in results] == [[1.0, 3.0], [2.0, 3.0]]
    assert [result["seen"] for result in results] == [1.0, 1.0]
    assert [result["unused"] for result in results] == [True, True]
