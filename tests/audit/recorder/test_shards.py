"""The parts of a parameter whose gradient a rank has under Megatron's distributed optimizer."""

from types import SimpleNamespace

import pytest
import torch

from meshwright.audit.recorder.libraries.megatron_shards import OwnRange, boxes_in, divided_parts


@pytest.mark.parametrize("box", [((4, 7),), ((0, 5), (8, 4)), ((2, 3), (0, 1))])
@pytest.mark.parametrize("bounds", [(0, 100), (-3, 6), (1, 2), (2, 11), (5, 9), (4, 4), (30, 40)])
def test_boxes_cover_a_range_of_the_flattened_tensor_once(
    box: tuple[tuple[int, int], ...], bounds: tuple[int, int]
) -> None:
    shape = [size for _, size in box]
    covered = torch.zeros(shape)
    numbered = torch.arange(covered.numel()).reshape(shape)
    for inner, start, end in boxes_in(box, *bounds):
        view, numbers = covered, numbered
        for dim, ((first, size), (offset, _)) in enumerate(zip(inner, box, strict=True)):
            view, numbers = view.narrow(dim, first - offset, size), numbers.narrow(dim, first - offset, size)
        view += 1
        assert numbers.reshape(-1).tolist() == list(range(start, end))
    expected = torch.zeros(covered.numel())
    expected[max(0, bounds[0]) : max(0, bounds[1])] = 1
    assert torch.equal(covered.reshape(-1), expected)


def test_a_rank_has_whole_weights_and_the_gradient_of_its_range() -> None:
    """A fused weight: its pieces lie one after the other in the parameter, and apart in the whole."""
    parameter = torch.arange(24.0).reshape(6, 4)
    own = OwnRange(6, 15, SimpleNamespace(grad=100 + torch.arange(6.0, 15.0)))
    pieces = [
        (((0, 3), (0, 4)), 0, lambda: parameter[:3]),
        (((10, 3), (0, 4)), 12, lambda: parameter[3:]),
    ]
    parts = list(divided_parts(pieces, own))
    assert [part.gradient() for part in parts[:2]] == [None, None]
    weights = [part.weight() for part in parts]
    assert weights[0] is not None
    assert torch.equal(weights[0], parameter[:3])
    assert weights[2:] == [None] * len(parts[2:])
    whole = torch.full((13, 4), -1.0)
    for part in parts[2:]:
        gradient = part.gradient()
        assert gradient is not None
        part.region.write(whole, gradient)
    assert whole[:3].reshape(-1)[6:].tolist() == [100 + number for number in range(6, 12)]
    assert whole[10].tolist() == [112, 113, 114, -1]
    assert int((whole >= 0).sum()) == 9
