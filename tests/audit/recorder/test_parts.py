"""A region takes its part of a whole tensor, and writes it back to the same place."""

import pytest
import torch

from meshwright.audit.recorder.parts import Region, whole_region

WHOLE = torch.arange(48.0).reshape(8, 6)
REGIONS = {
    "whole": whole_region((8, 6)),
    "rows": Region(box=((2, 3), (0, 6))),
    "columns": Region(box=((0, 8), (3, 3))),
    "box": Region(box=((4, 2), (1, 4))),
    "flat": Region(flat=(5, 29)),
    "empty": Region(flat=(7, 7)),
    "fused": Region(box=((2, 2), (0, 6)), dim=0, blocks=2),  # rows 2, 3, 6, 7
}


@pytest.mark.parametrize("name", REGIONS)
def test_parts_are_written_where_they_were_taken(name: str) -> None:
    region = REGIONS[name]
    part = region.of(WHOLE).clone()
    target = torch.full_like(WHOLE, -1.0)
    region.write(target, part)
    assert torch.equal(region.of(target), part)
    assert int((target != -1).sum()) == part.numel()
    assert torch.equal(target[target != -1], WHOLE[target != -1])
    assert Region.from_json(region.to_json()) == region


def test_a_fused_weight_is_divided_block_by_block() -> None:
    assert torch.equal(REGIONS["fused"].of(WHOLE), WHOLE[[2, 3, 6, 7]])
