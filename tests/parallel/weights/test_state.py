"""Whole weights and gradients come out of every plan bitwise as they went in."""

import pytest
import torch
from torch import Tensor

from meshwright.parallel.weights.state import full_gradients, full_state
from tests.parallel.divided import AXES, divide, held_bytes, whole_model
from tests.ranks import RankPool
from tests.soaked import all_but

Found = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], int]


def whole(rank: int, size: int, axes: dict[str, int], order: list[str]) -> Found:
    parts = divide(axes, size)
    state = full_state(parts.module, parts.layouts, parts.mesh, order=order)
    gradients = full_gradients(parts.module, parts.layouts, parts.mesh, tied=parts.tied, order=order)
    first = full_state(parts.module, parts.layouts, parts.mesh, order=order, everywhere=False)
    return state, gradients, first, held_bytes(parts.module)


@pytest.mark.parametrize("axes", all_but(AXES[::2], AXES), ids=str)
def test_state_and_gradients_are_those_of_the_untouched_model(four: RankPool, axes: dict[str, int]) -> None:
    model = whole_model()
    expected = model.state_dict()
    grown = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for rank, (state, gradients, first, held) in enumerate(four.run(whole, axes, list(expected))):
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        assert gradients.keys() == grown.keys()
        assert all(torch.equal(gradients[name], value) for name, value in grown.items())
        assert first.keys() == (expected.keys() if rank == 0 else set())
        assert axes == {"replicate": 4} or held < held_bytes(model), "it was divided"
