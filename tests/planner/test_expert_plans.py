"""The planner divides the experts of a large mixture over data ranks, and says why."""

import pytest
import torch

from meshwright.cluster.detect import find_cluster
from meshwright.planner.explanation.explain import explain
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.planner.search import search
from meshwright.profile.optimizer import optimizer_cost
from meshwright.workloads.text.decoder import Decoder, NextTokenLoss


@pytest.mark.soak
def test_the_planner_proposes_divided_experts_with_reasons() -> None:
    with torch.device("meta"):
        large = Decoder(6, 4096, 32, 2048, 32000, activation="swiglu", feedforward=14336, experts={"number": 8})
    optimizer = optimizer_cost(torch.optim.AdamW(large.parameters()), on_gpu=True)
    tokens = torch.zeros(2, 2048, dtype=torch.int64)
    inputs = PlanningInputs(find_cluster("8xH100"), 64, optimizer, top=3)
    result = search(inputs, Profiles(large, (tokens, tokens), NextTokenLoss()))
    best = result.ranked[0]
    assert best.plan.axes.expert > 1
    assert best.needed_bytes <= inputs.capacity_bytes
    (sentence,) = [sentence for sentence in explain(result, inputs) if sentence.startswith("Expert ")]
    assert "of the weights" in sentence
    assert "If all tokens went to one rank" in sentence
