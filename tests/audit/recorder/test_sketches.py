"""Sketches of parts, put together, are the sketch of the whole, however the whole is divided."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.audit.recorder.parts import Region, whole_region
from meshwright.audit.recorder.record_files import write_tensors
from meshwright.audit.recorder.sketches import Sketch, sketch_of, sketch_part, square_of
from meshwright.audit.recorder.whole import RankRecord, WholeTensors

SHAPE = (12, 1000)
DIVISIONS = {
    "rows": [Region(box=((0, 5), (0, 1000))), Region(box=((5, 7), (0, 1000)))],
    "columns": [Region(box=((0, 12), (0, 500))), Region(box=((0, 12), (500, 500)))],
    "columns by three": [Region(box=((0, 12), (at, size))) for at, size in ((0, 334), (334, 333), (667, 333))],
    "rows and columns": [Region(box=((r, 6), (c, 500))) for r in (0, 6) for c in (0, 500)],
    "flat": [Region(flat=(0, 3210)), Region(flat=(3210, 3215)), Region(flat=(3215, 12000))],
    "fused rows": [Region(box=((at, 2), (0, 1000)), dim=0, blocks=3) for at in (0, 2)],
    "fused columns": [Region(box=((0, 12), (at, 250)), dim=1, blocks=2) for at in (0, 250)],
    "copies": [whole_region(SHAPE), whole_region(SHAPE)],
    "copies of flat parts": [Region(flat=(0, 3210)), Region(flat=(3210, 12000))] * 2,
}


def _write(folder: Path, value: Tensor, regions: list[Region], above: int | None) -> list[RankRecord]:
    """A record of one tensor, `w`, of which each rank has a region."""
    for rank, region in enumerate(regions):
        own = folder / f"rank-{rank:05d}"
        own.mkdir(parents=True)
        entry = {"shape": list(value.shape), "same_as": None, "parts": [region.to_json()]}
        (own / "header.json").write_text(json.dumps({"rank": rank, "parameters": {"w": entry}, "buffers": {}}))
        part, sketch = region.of(value), sketch_of(tuple(value.shape), above)
        tensors = {"w#0": part.contiguous()}
        if sketch is not None:
            tensors = {"w#0.sketch": sketch_part(sketch, region, part), "w#0.square": square_of(part)}
        write_tensors(own / "0001-gradient-0.safetensors", tensors)
    return [RankRecord(path) for path in sorted(folder.glob("rank-*"))]


@pytest.mark.parametrize("written", ["sketch", "elements"])
@pytest.mark.parametrize("name", DIVISIONS)
def test_parts_of_a_sketch_are_put_together(tmp_path: Path, name: str, written: str) -> None:
    value = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).double()
    ranks = _write(tmp_path, value, DIVISIONS[name], 1000 if written == "sketch" else None)
    tensors = WholeTensors(ranks, 1, "gradient", sketch_above=1000)
    expected = sketch_part(Sketch(SHAPE), whole_region(SHAPE), value).reshape(Sketch(SHAPE).size)
    whole = tensors.whole("w")
    assert whole is not None
    torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)
    assert tensors.square("w") == pytest.approx(float(value.square().sum()), rel=1e-12)
    for part in tensors.parts["w"]:
        torch.testing.assert_close(part.value, part.region.of(expected), rtol=1e-12, atol=1e-12)


def test_a_part_that_no_rank_wrote_leaves_a_hole(tmp_path: Path) -> None:
    ranks = _write(tmp_path, torch.randn(SHAPE), DIVISIONS["flat"][:2], 1000)
    assert WholeTensors(ranks, 1, "gradient", sketch_above=1000).whole("w") is None


def test_a_sketch_is_linear_and_keeps_single_columns() -> None:
    sketch, region = Sketch(SHAPE), whole_region(SHAPE)
    one, other = torch.randn(2, *SHAPE, dtype=torch.float64)
    first, second = (sketch_part(sketch, region, value) for value in (one, other))
    torch.testing.assert_close(sketch_part(sketch, region, 3 * one + other), 3 * first + second)
    plain = first.reshape(sketch.size)[:, sketch.blocks :]
    assert torch.equal(plain, one[:, sketch.plain])


def test_every_changed_element_changes_the_sketch() -> None:
    sketch, region = Sketch((2, 1000)), whole_region((2, 1000))
    changes = torch.eye(2000, dtype=torch.float64).reshape(2000, 2, 1000)
    for element in range(2000):
        row, column = divmod(element, 1000)
        changed = sketch_part(sketch, region, changes[element]).reshape(sketch.size)
        slots = changed[row].nonzero().reshape(-1).tolist()
        assert slots
        assert all(sketch.columns_of(slot)[0] <= column <= sketch.columns_of(slot)[1] for slot in slots)


@pytest.mark.parametrize("shape", [(64, 64, 3, 3), (8, 96, 64), (4096, 40)])
def test_shapes_of_other_dimensions(shape: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    sketch = sketch_of(shape, 1)
    assert sketch is not None
    assert sketch.size[0] == shape[0]
    assert sketch_part(sketch, whole_region(shape), value).numel() == sketch.size[0] * sketch.size[1]


@pytest.mark.parametrize("shape", [(1000,), (500, 8), (30, 30)])
def test_small_tensors_vectors_and_narrow_matrices_are_written_whole(shape: tuple[int, ...]) -> None:
    assert sketch_of(shape, 900) is None
