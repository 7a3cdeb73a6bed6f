"""What a rank holds of a divided tensor, as rectangles of the whole, covers it exactly once."""

from itertools import product
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright.parallel.weights.layout import Layout, fill_from, gathered, lay_out, part_of, rectangles, view_of
from tests.ranks import RankPool

SHAPES = [(7, 6), (6, 7), (1, 5), (9,)]


def layouts(shape: tuple[int, ...], size: int, rank: int) -> list[Layout | None]:
    found: list[Layout | None] = [None]
    for dim in range(len(shape)):
        for parts in ((), (shape[dim] - 1, 1)):
            if all(parts) or not parts:
                found.append(lay_out(shape, dim, parts, "tensor", size, rank))
    return found


def check(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    wrong = []
    for shape in SHAPES:
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        for number, layout in enumerate(layouts(shape, 2, mesh.get_local_rank("tensor"))):
            part = part_of(whole, layout) if layout else whole
            held = distribute_tensor(part.contiguous(), mesh["shard"], [Shard(0)])
            empty: Any = torch.zeros_like(held)
            # Every rank's numbers, by their place in the whole.
            seen = torch.full(shape, -1.0)
            count = torch.zeros(shape)
            for r in rectangles(held, layout):
                place = tuple(slice(o, o + s) for o, s in zip(r.offsets, r.sizes, strict=True))
                seen[place] = view_of(held.to_local(), r)
                count[place] += 1
            if not torch.equal(seen[count > 0], whole[count > 0]) or int(count.sum()) != held.to_local().numel():
                wrong.append(f"rectangles {shape} {number}")
            if not torch.equal(gathered(held, layout, mesh), whole):
                wrong.append(f"gathered {shape} {number}")
            fill_from(empty, layout, whole)
            if not torch.equal(empty.to_local(), held.to_local()):
                wrong.append(f"fill_from {shape} {number}")
    return wrong


def test_rectangles_of_tensor_and_shard_axes(four: RankPool) -> None:
    assert four.run(check) == [[]] * 4


def test_a_part_of_a_fused_layer_is_several_rectangles() -> None:
    whole = torch.arange(24.0).view(12, 2)
    layout = lay_out((12, 2), 0, (6, 4, 2), "tensor", 2, 1)
    part = part_of(whole, layout)
    assert [(r.offsets, r.sizes, r.begin) for r in rectangles(part, layout)] == [
        ((3, 0), (3, 2), (0, 0)),
        ((8, 0), (2, 2), (3, 0)),
        ((11, 0), (1, 2), (5, 0)),
    ]
    for r, c in product(range(6), range(2)):
        assert part[r, c] in whole
    assert [(r.offsets, r.sizes) for r in rectangles(torch.tensor(1.0), None)] == [((), ())]
