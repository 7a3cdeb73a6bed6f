"""Under every plan, the gathered weights and gradients are bitwise those of the untouched model."""

import pytest
import torch
from torch import Tensor

from meshwright.parallel.weights.state import full_gradients, full_state
from tests.parallel.hand_sharded import AXES, local_parameter_bytes, shard_by_hand, whole_model
from tests.ranks import RankPool
from tests.soaked import all_but

Gathered = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], int]


def gather(rank: int, size: int, axes: dict[str, int], order: list[str]) -> Gathered:
    parts = shard_by_hand(axes, size)
    state = full_state(parts.module, parts.layouts, parts.mesh, order=order)
    gradients = full_gradients(parts.module, parts.layouts, parts.mesh, tied=parts.tied, order=order)
    on_first_rank = full_state(parts.module, parts.layouts, parts.mesh, order=order, everywhere=False)
    return state, gradients, on_first_rank, local_parameter_bytes(parts.module)


@pytest.mark.parametrize("axes", all_but(AXES[::2], AXES), ids=str)
def test_state_and_gradients_are_those_of_the_untouched_model(four: RankPool, axes: dict[str, int]) -> None:
    model = whole_model()
    expected = model.state_dict()
    expected_gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for rank, (state, gradients, on_first_rank, local_bytes) in enumerate(four.run(gather, axes, list(expected))):
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        assert gradients.keys() == expected_gradients.keys()
        assert all(torch.equal(gradients[name], value) for name, value in expected_gradients.items())
        assert on_first_rank.keys() == (expected.keys() if rank == 0 else set())
        assert axes == {"replicate": 4} or local_bytes < local_parameter_bytes(model), "the plan divides the model"
