"""The regions that ranks hold of a divided tensor cover the whole tensor exactly once."""

from itertools import product
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright.parallel.weights.layout import (
    ParameterLayout,
    fill_local_shard,
    gather_parameter,
    local_shard,
    region_view,
    shard_layout,
    shard_regions,
)
from tests.ranks import RankPool

SHAPES = [(7, 6), (6, 7), (1, 5), (9,)]


def layouts(shape: tuple[int, ...], size: int, rank: int) -> list[ParameterLayout | None]:
    all_layouts: list[ParameterLayout | None] = [None]
    for dim in range(len(shape)):
        for parts in ((), (shape[dim] - 1, 1)):
            if all(parts) or not parts:
                all_layouts.append(shard_layout(shape, dim, parts, "tensor", size, rank))
    return all_layouts


def check(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    wrong = []
    for shape in SHAPES:
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        for number, layout in enumerate(layouts(shape, 2, mesh.get_local_rank("tensor"))):
            shard = local_shard(whole, layout) if layout else whole
            sharded = distribute_tensor(shard.contiguous(), mesh["shard"], [Shard(0)])
            empty: Any = torch.zeros_like(sharded)
            # This rank's elements, at their positions in the whole tensor.
            covered = torch.full(shape, -1.0)
            count = torch.zeros(shape)
            for region in shard_regions(sharded, layout):
                position = tuple(slice(o, o + s) for o, s in zip(region.offsets, region.sizes, strict=True))
                covered[position] = region_view(sharded.to_local(), region)
                count[position] += 1
            if not torch.equal(covered[count > 0], whole[count > 0]) or int(count.sum()) != sharded.to_local().numel():
                wrong.append(f"shard_regions {shape} {number}")
            if not torch.equal(gather_parameter(sharded, layout, mesh), whole):
                wrong.append(f"gather_parameter {shape} {number}")
            fill_local_shard(empty, layout, whole)
            if not torch.equal(empty.to_local(), sharded.to_local()):
                wrong.append(f"fill_local_shard {shape} {number}")
    return wrong


def test_regions_of_tensor_and_shard_axes_cover_the_whole(four: RankPool) -> None:
    assert four.run(check) == [[]] * 4


def test_a_shard_of_a_fused_layer_has_several_regions() -> None:
    whole = torch.arange(24.0).view(12, 2)
    layout = shard_layout((12, 2), 0, (6, 4, 2), "tensor", 2, 1)
    shard = local_shard(whole, layout)
    assert [(r.offsets, r.sizes, r.local_offsets) for r in shard_regions(shard, layout)] == [
        ((3, 0), (3, 2), (0, 0)),
        ((8, 0), (2, 2), (3, 0)),
        ((11, 0), (1, 2), (5, 0)),
    ]
    for r, c in product(range(6), range(2)):
        assert shard[r, c] in whole
    assert [(r.offsets, r.sizes) for r in shard_regions(torch.tensor(1.0), None)] == [((), ())]
