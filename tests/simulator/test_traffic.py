"""The bytes that a step exchanges, in closed form."""

from typing import Any

import pytest
import torch

from meshwright.plan import Plan
from meshwright.profile.tracing.trace import trace_profile
from meshwright.simulator.runtime import OUR_RUNTIME, Runtime
from meshwright.simulator.traffic import Exchange, exchanges
from meshwright.workloads.text.decoder import Decoder
from tests.profile.models import scores_loss, small_model
from tests.simulator.communication.test_exchange import BATCH, HIDDEN, LAYERS, LENGTH, ONE, traced


def weight_bytes() -> int:
    return traced().parameter_bytes


def step_exchanges(runtime: Runtime = OUR_RUNTIME, rank: int = 0, **groups: Any) -> tuple[Exchange, ...]:
    return exchanges(traced(), Plan.model_validate(groups), BATCH, runtime, rank)


def total_bytes(sent: tuple[Exchange, ...], axis: str, collective: str) -> float:
    return sum(e.bytes * e.count for e in sent if (e.axis, e.collective) == (axis, collective))


def test_one_rank_sends_nothing() -> None:
    assert step_exchanges() == ()


def test_replicas_combine_each_gradient_once_a_step() -> None:
    sent = step_exchanges(
        axes={"replicate": 4}, memory={"accumulation": 3}, gradients={"bucket_bytes": weight_bytes() // 4}
    )
    assert sent == (Exchange("replicate", "all_reduce", weight_bytes() / 4, 4),)


@pytest.mark.parametrize(("level", "scatters", "gathers"), [
    ("parameters", 3, 6), ("gradients", 3, 1), ("optimizer", 1, 1)
])  # fmt: skip
def test_shards_gather_and_scatter_as_often_as_their_level_says(level: str, scatters: int, gathers: int) -> None:
    sent = step_exchanges(axes={"shard": 4, "replicate": 2}, memory={"accumulation": 3, "sharding": level})
    assert total_bytes(sent, "shard", "reduce_scatter") == pytest.approx(scatters * weight_bytes())
    in_blocks = sum(p.bytes for p in traced().parameters if p.names[0].startswith("blocks."))
    rest = gathers // 2 if level == "parameters" else 1  # it stays gathered for its backward pass
    assert total_bytes(sent, "shard", "all_gather") == pytest.approx(
        gathers * in_blocks + rest * (weight_bytes() - in_blocks)
    )
    assert total_bytes(sent, "replicate", "all_reduce") == pytest.approx(weight_bytes() / 4)


def test_split_layers_exchange_in_every_microbatch() -> None:
    sent = step_exchanges(axes={"tensor": 4}, modules={"loss": True}, memory={"accumulation": 3})
    # Two per block and pass, the embedding's forward and the head's backward pass; four numbers per target.
    assert total_bytes(sent, "tensor", "all_reduce") == 3 * (ONE * (2 * 2 * LAYERS + 2) + BATCH * LENGTH * 4 * 4)


def test_activations_and_gradients_cross_a_cut_in_every_microbatch() -> None:
    shape: dict[str, Any] = {"cuts": ["blocks.1", "blocks.3"], "microbatches": 6}
    for rank, neighbors in ((0, 1), (1, 2), (2, 1)):
        sent = step_exchanges(rank=rank, axes={"pipeline": 3}, pipeline=shape)
        assert sent == (Exchange("pipeline", "point_to_point", BATCH * LENGTH * HIDDEN * 4, 6 * neighbors),)


def test_stages_of_one_rank_send_nothing_to_each_other() -> None:
    """The two middle stages of the zbv schedule are on one rank."""
    shape: dict[str, Any] = {"cuts": ["blocks.1", "blocks.2", "blocks.3"], "microbatches": 6, "schedule": "zbv"}
    for rank in (0, 1):
        sent = step_exchanges(rank=rank, axes={"pipeline": 2}, pipeline=shape)
        assert total_bytes(sent, "pipeline", "point_to_point") == 2 * 6 * ONE


def test_a_divided_sequence_is_gathered_after_a_cut() -> None:
    groups: dict[str, Any] = {
        "axes": {"pipeline": 2, "tensor": 4},
        "pipeline": {"cuts": ["blocks.2"], "microbatches": 2},
        "modules": {"sequence": True, "loss": True},
    }
    undivided = {**groups, "modules": {"sequence": False, "loss": True}}
    divided, whole = step_exchanges(**groups), step_exchanges(**undivided)
    assert (
        total_bytes(divided, "pipeline", "point_to_point")
        == total_bytes(whole, "pipeline", "point_to_point")
        == 2 * ONE
    )
    assert total_bytes(divided, "tensor", "all_gather") > total_bytes(whole, "tensor", "all_gather") == 0


def test_shards_of_a_pipeline_stay_gathered_after_a_backward_pass() -> None:
    shape = {"cuts": ["blocks.2"], "microbatches": 4}
    sent = step_exchanges(axes={"shard": 4, "pipeline": 2}, pipeline=shape)
    stage_bytes = total_bytes(sent, "shard", "reduce_scatter")  # once a step
    blocks = sum(p.bytes for p in traced().parameters if p.names[0].startswith("blocks.")) / 2
    # 1f1b with four microbatches gathers the blocks before five of its passes.
    assert total_bytes(sent, "shard", "all_gather") == stage_bytes - blocks + 5 * blocks


def test_tied_weights_of_a_pipeline_are_summed_once_a_step() -> None:
    with torch.device("meta"):
        tokens = torch.empty(2, LENGTH, dtype=torch.long)
        model = Decoder(layers=2, hidden=HIDDEN, heads=8, sequence=LENGTH, vocabulary=96, tied=True)
    plan = Plan.model_validate({"axes": {"pipeline": 2}, "pipeline": {"cuts": ["blocks.0"], "microbatches": 2}})
    tied = trace_profile(model, (tokens, tokens), scores_loss, with_structure=True)
    for rank in (0, 1):
        sent = exchanges(tied, plan, BATCH, pipeline_rank=rank)
        assert Exchange("pipeline", "all_reduce", 96 * HIDDEN * 4, 1) in sent


def test_with_other_axes_gradients_carry_one_number_per_weight() -> None:
    groups: dict[str, Any] = {
        "axes": {"replicate": 2, "pipeline": 2},
        "pipeline": {"cuts": ["blocks.2"], "microbatches": 2},
    }
    averaged = sum(total_bytes(step_exchanges(rank=rank, **groups), "replicate", "all_reduce") for rank in (0, 1))
    assert averaged == weight_bytes() + 4 * len(traced().parameters)


def test_buffers_are_broadcast_from_the_first_data_rank() -> None:
    model, batch, loss = small_model("resnet18")
    traced_images = trace_profile(model, batch, loss)
    sent = exchanges(traced_images, Plan.model_validate({"axes": {"replicate": 2, "shard": 2}}), BATCH)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert {Exchange(axis, "broadcast", buffers, 1) for axis in ("replicate", "shard")} <= set(sent)
