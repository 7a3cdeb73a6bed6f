"""A rank of the context axis computes and keeps its part of the tokens, and exchanges keys and values."""

from functools import cache
from typing import Any

import pytest
import torch

from meshwright.cluster.detect import find_cluster
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost, optimizer_cost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.communication.collectives import collective_s
from meshwright.simulator.communication.placement import axis_groups
from meshwright.simulator.context import key_value_messages
from meshwright.simulator.predict import Prediction, predict_plan
from meshwright.workloads.text.decoder import Decoder, NextTokenLoss

LAYERS, HEADS, KEY_VALUE_HEADS, WIDTH, LENGTH = 4, 16, 4, 128, 32_768


@cache
def traced() -> tuple[ModelProfile, OptimizerCost]:
    hidden = HEADS * WIDTH
    with torch.device("meta"):
        model = Decoder(LAYERS, hidden, HEADS, LENGTH, 1_000, kv_heads=KEY_VALUE_HEADS, positions="rotary", tied=False)
        batch = (torch.empty(1, LENGTH, dtype=torch.int64), torch.empty(1, LENGTH, dtype=torch.int64))
    profile = trace_profile(model, batch, NextTokenLoss(), precision="bf16", with_structure=True)
    return profile, optimizer_cost(torch.optim.AdamW(model.parameters()), on_gpu=True)


def predicted(axes: dict[str, int], exchange: str = "ring", global_batch: int = 8) -> Prediction:
    groups: dict[str, Any] = {"modules": {"attention_exchange": exchange}, "numerics": {"precision": "bf16"}}
    profile, optimizer = traced()
    plan = Plan.model_validate({"axes": axes, **groups})
    return predict_plan(find_cluster("8xH100"), profile, plan, global_batch, optimizer)


def test_a_rank_computes_its_part_of_the_tokens_and_adds_the_exchange() -> None:
    divided, samples = predicted({"context": 8}), predicted({"replicate": 8})
    assert divided.breakdown["compute"] == pytest.approx(samples.breakdown["compute"])
    assert divided.breakdown["replicate"] == pytest.approx(samples.breakdown["replicate"])
    assert divided.breakdown["context"] > 0
    assert "context" not in samples.breakdown
    assert sum(divided.breakdown.values()) == pytest.approx(divided.step_s)


def test_activations_of_one_sequence_are_divided() -> None:
    whole, eighth = (predicted(axes, global_batch=1).memory.breakdown for axes in ({}, {"context": 8}))
    assert eighth["activations"] == pytest.approx(whole["activations"] / 8, rel=0.01)
    assert eighth["weights"] == whole["weights"]
    assert predicted({"shard": 2, "context": 4}, global_batch=2).memory.breakdown["weights"] == whole["weights"] / 8


def test_a_ring_hides_its_exchange_behind_attention() -> None:
    ring, gathered = (predicted({"context": 8}, name).breakdown["context"] for name in ("ring", "all_gather"))
    assert ring < 0.5 * gathered


def test_a_ring_of_a_model_like_llama_3_8b_is_hidden_to_four_fifths() -> None:
    """What is left is that attention and messages slow each other down."""
    cluster, length, heads = find_cluster("8xH100"), 131_072, 32
    with torch.device("meta"):
        model = Decoder(1, 4_096, heads, length, 1_000, 8, "rms", "rotary", "swiglu", False, 14_336, False)
        batch = (torch.empty(1, length, dtype=torch.int64), torch.empty(1, length, dtype=torch.int64))
    profile = trace_profile(model, batch, NextTokenLoss(), precision="bf16", with_structure=True)
    plan = Plan.model_validate(
        {"axes": {"context": 8}, "modules": {"attention_exchange": "ring"}, "numerics": {"precision": "bf16"}}
    )
    adamw = optimizer_cost(torch.optim.AdamW(model.parameters()), on_gpu=True)
    exposed_s = predict_plan(cluster, profile, plan, 1, adamw).breakdown["context"]
    group = axis_groups(plan.axes, cluster)["context"]
    messages = key_value_messages(profile, plan, batch=1 / 8)
    all_s = sum(m.times * collective_s(m.collective, m.bytes, group, cluster) for m in messages)
    assert 0 < exposed_s <= 0.2 * all_s


@pytest.mark.parametrize("name", ["ring", "all_gather"])
def test_messages_have_the_bytes_of_keys_and_values(name: str) -> None:
    plan = Plan.model_validate({"axes": {"context": 4}, "modules": {"attention_exchange": name}})
    messages = key_value_messages(traced()[0], plan, batch=1 / 4)
    elements = 2 * KEY_VALUE_HEADS * WIDTH * LENGTH / 4  # of one rank, in one layer
    sent: dict[tuple[str, bool], float] = {}
    for message in messages:
        key = (message.collective, message.forward)
        sent[key] = sent.get(key, 0.0) + message.bytes * message.times
    if name == "ring":
        expected = {
            ("point_to_point", True): LAYERS * 3 * elements * 2,
            ("point_to_point", False): LAYERS * (3 * elements * 2 + 3 * elements * 4),
        }
    else:
        expected = {
            ("all_gather", True): LAYERS * 4 * elements * 2,
            ("all_gather", False): LAYERS * 4 * elements * 2,
            ("reduce_scatter", False): LAYERS * 4 * elements * 4,
        }
    assert sent == pytest.approx(expected)
