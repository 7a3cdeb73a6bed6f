"""Predictions of plans that divide experts over ranks, in closed form."""

from functools import cache
from typing import Any

import pytest
import torch

from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost, optimizer_cost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.experts import expert_names
from meshwright.simulator.predict import predict_plan
from meshwright.simulator.tensor.split_profile import split_profile
from meshwright.simulator.traffic import exchanges
from meshwright.workloads.text.decoder import Decoder, NextTokenLoss

LAYERS, HIDDEN, LENGTH, EXPERTS, CHOICES, BATCH = 6, 64, 32, 8, 2, 16


def model() -> Decoder:
    with torch.device("meta"):
        return Decoder(LAYERS, HIDDEN, 4, LENGTH, 128, feedforward=256, experts={"number": EXPERTS, "top_k": CHOICES})


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    return tokens, tokens


@cache
def profile() -> ModelProfile:
    return trace_profile(model(), sample(), NextTokenLoss(), with_structure=True)


@cache
def adamw() -> OptimizerCost:
    return optimizer_cost(torch.optim.AdamW(model().parameters()), on_gpu=True)


def weights_of(**axes: int) -> int:
    plan = Plan.model_validate({"axes": axes})
    return predict_plan(find_cluster("8xH100"), profile(), plan, BATCH, adamw()).memory.breakdown["weights"]


def test_a_rank_holds_its_share_of_the_experts() -> None:
    names = expert_names(profile())
    of_experts = sum(p.bytes for p in profile().parameters if p.names[0] in names)
    others = profile().parameter_bytes - of_experts
    assert of_experts == LAYERS * EXPERTS * 2 * HIDDEN * 256 * 4
    assert weights_of(replicate=8) == others + of_experts
    assert weights_of(replicate=8, expert=4) == others + of_experts / 4
    assert weights_of(shard=8, expert=4) == pytest.approx((others + of_experts) / 8, abs=8)


@pytest.mark.parametrize(("recompute", "times"), [("none", 2), ("full", 3)])
def test_tokens_go_to_experts_and_back_in_both_passes(recompute: str, times: int) -> None:
    plan = Plan.model_validate({"axes": {"replicate": 4, "expert": 4}, "memory": {"recompute": recompute}})
    sent = [e for e in exchanges(profile(), plan, BATCH / 4) if e.axis == "expert" and e.collective == "all_to_all"]
    rows = BATCH // 4 * LENGTH * CHOICES
    assert sum(e.bytes * e.count for e in sent) == times * LAYERS * rows * (2 * HIDDEN + 1) * 4
    prediction = predict_plan(find_cluster("8xH100"), profile(), plan, BATCH, adamw())
    assert prediction.breakdown["expert"] > 0
    assert sum(prediction.breakdown.values()) == pytest.approx(prediction.step_s)


def test_experts_that_the_ranks_do_not_divide_are_refused() -> None:
    plan = Plan.model_validate({"axes": {"replicate": 3, "expert": 3}})
    with pytest.raises(InputError, match="does not divide the model's 8 experts"):
        predict_plan(find_cluster("8xH100"), profile(), plan, 12, adamw())


def test_tensor_ranks_compute_all_rows_of_experts_also_if_they_divide_the_sequence() -> None:
    plan = Plan.model_validate({"axes": {"tensor": 2}, "modules": {"sequence": True}})
    layer = profile().experts[0].module
    halved = False
    for whole, split in zip(profile().segments, split_profile(profile(), plan).segments, strict=True):
        parts: list[tuple[Any, Any]] = [
            *zip(whole.operators, split.operators, strict=True),
            *zip(whole.changes, split.changes, strict=True),
        ]
        for before, after in parts:
            if before.layer == layer:
                assert after.bytes == before.bytes
            halved |= after.bytes == before.bytes.scaled(0.5)
    assert halved
