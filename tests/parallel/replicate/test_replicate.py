"""All data ranks get the buffers of the first one, and DDP ignores the parameters that it is told to ignore (more on
that in test_gradient_averaging.py)."""

import pytest
import torch
from torch import nn

from meshwright.collectives.native import NativeReducer
from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.replicate.replicate import broadcast_buffers, replicate
from meshwright.plan import Plan
from tests.ranks import RankPool


def broadcast(rank: int, size: int, axes: dict[str, int]) -> list[float]:
    mesh = build_mesh(Plan.model_validate({"axes": axes}), "cpu", size)
    assert mesh is not None
    model = nn.BatchNorm1d(2)
    assert model.running_mean is not None
    assert model.num_batches_tracked is not None
    model.running_mean.fill_(rank)
    model.num_batches_tracked.fill_(10 + rank)
    broadcast_buffers(model, mesh)
    return [*model.running_mean.tolist(), float(model.num_batches_tracked)]


@pytest.mark.parametrize(
    ("axes", "sources"),
    [
        ({"replicate": 4}, [0, 0, 0, 0]),
        ({"shard": 4}, [0, 0, 0, 0]),
        ({"replicate": 2, "shard": 2}, [0, 0, 0, 0]),
        ({"replicate": 2, "tensor": 2}, [0, 1, 0, 1]),
        ({"pipeline": 2, "shard": 2}, [0, 0, 2, 2]),
    ],
)
def test_buffers_are_those_of_the_first_data_rank(four: RankPool, axes: dict[str, int], sources: list[int]) -> None:
    assert four.run(broadcast, axes) == [[rank, rank, 10 + rank] for rank in sources]


def ignored_at_the_root(rank: int, size: int) -> float:
    mesh = build_mesh(Plan.model_validate({"axes": {"replicate": size}}), "cpu", size)
    assert mesh is not None
    layer = nn.Linear(1, 1)
    nn.init.constant_(layer.weight, float(rank))
    runner = replicate(layer, mesh, Plan(), NativeReducer(mesh.get_group()), {"weight"})
    runner(torch.ones(1, 1)).backward()
    return float(layer.weight.detach())


def test_a_parameter_of_the_root_module_can_be_ignored(four: RankPool) -> None:
    assert four.run(ignored_at_the_root) == [0.0, 1.0, 2.0, 3.0]
