"""Under every plan, the gathered weights and gradients are bitwise those of the untouched model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import InputError
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


def gather_other_strides(rank: int, size: int) -> dict[str, Tensor]:
    parts = shard_by_hand({"pipeline": 2}, size)
    if rank == 1:
        layer = nn.Conv2d(2, 3, 2)
        layer.weight = nn.Parameter(images())
        layer.register_buffer("turned", images()[0, 0].t())
        parts.module.add_module("layer", layer)
    return full_state(parts.module, parts.layouts, parts.mesh)


def images() -> Tensor:
    return torch.arange(24.0).view(3, 2, 2, 2).contiguous(memory_format=torch.channels_last)


def test_weights_of_a_stage_with_other_strides_reach_all_ranks(two: RankPool) -> None:
    for state in two.run(gather_other_strides):
        assert torch.equal(state["layer.weight"], images())
        assert torch.equal(state["layer.turned"], images()[0, 0].t())


class WithExtraState(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.extra_state = state

    def get_extra_state(self) -> Any:
        return self.extra_state


def gather_extra_state(rank: int, size: int, of_last_stage: Any) -> Any:
    """Returns the extra state of a module of the last stage, or the message of the error."""
    parts = shard_by_hand({"pipeline": 2}, size)
    if rank == 1:
        parts.module.add_module("counting", WithExtraState(of_last_stage))
    try:
        return full_state(parts.module, parts.layouts, parts.mesh)["counting._extra_state"]
    except InputError as error:
        return str(error)


def test_the_extra_state_of_a_stage_reaches_all_ranks(two: RankPool) -> None:
    state = {"steps": 3, 0: (1, None), "best": float("inf")}
    assert two.run(gather_extra_state, state) == [state, state]
    assert two.run(gather_extra_state, None) == [None, None]


def test_an_extra_state_that_cannot_be_sent_is_named_on_all_ranks(two: RankPool) -> None:
    message = (
        "counting._extra_state['a'][1] is a builtins.slice, which cannot be sent to other ranks: let get_extra_state"
        " return numbers, texts, tensors, and lists, tuples, sets and dicts of these"
    )
    assert two.run(gather_extra_state, {"a": [0, slice(3)]}) == [message, message]
