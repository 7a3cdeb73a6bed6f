"""A rank of the context axis keeps the activations of its own tokens only."""

import pytest
import torch
from torch import Tensor

from meshwright.parallel.context.divide_model import SequenceDivision, divide_inputs
from meshwright.parallel.context.exchange import Exchange
from meshwright.profile.structure.sequence import SequenceInput
from meshwright.workloads.text.decoder import Decoder, NextTokenLoss
from tests.parallel.context.test_attention import context_group
from tests.ranks import RankPool


def saved_bytes(model: Decoder, tokens: Tensor) -> int:
    """The bytes of all tensors that a forward pass and its loss save for the backward pass, except parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, int] = {}
    kept: list[Tensor] = []  # a freed address could be used again

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        NextTokenLoss()(model(tokens), tokens)
    return sum(storages.values())


def share_of_one_rank(rank: int, ranks: int, exchange: Exchange, length: int) -> float:
    model = Decoder(2, 32, 2, length, 50, positions="rotary")
    tokens = torch.arange(length).remainder(50)[None]
    whole = saved_bytes(model, tokens)
    inputs = [SequenceInput("tokens", 1, length)]
    divide_inputs(model, SequenceDivision(model, inputs, context_group(ranks), exchange))
    return saved_bytes(model, tokens) / whole


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
def test_four_ranks_keep_about_a_quarter_each(four: RankPool, exchange: Exchange) -> None:
    assert max(four.run(share_of_one_rank, exchange, 4_096)) < 0.3


@pytest.mark.soak
def test_four_ranks_keep_about_a_quarter_each_of_32768_tokens(four: RankPool) -> None:
    assert max(four.run(share_of_one_rank, "ring", 32_768)) < 0.3
