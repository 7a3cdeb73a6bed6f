"""The bytes that a step exchanges, in closed form."""

from typing import Any

import pytest
import torch

from meshwright.plan import Plan
from meshwright.profile.tracing.trace import trace_profile
from meshwright.simulator.runtime import OUR_RUNTIME, Runtime
from meshwright.workloads.text.decoder import Decoder
from tests.profile.models import scores_loss, small_model
from tests.simulator.communication.test_exchange import BATCH, HIDDEN, LAYERS, LENGTH, ONE, traced
from tests.simulator.traffic import Exchange, exchanges

WEIGHTS = traced().parameter_bytes


def found(runtime: Runtime = OUR_RUNTIME, rank: int = 0, **groups: Any) -> tuple[Exchange, ...]:
    chosen = Plan.model_validate(groups)
    return exchanges(traced(), chosen, BATCH, runtime, rank)


def total(of: tuple[Exchange, ...], axis: str, collective: str) -> float:
    return sum(e.bytes * e.count for e in of if (e.axis, e.collective) == (axis, collective))


def test_one_rank_sends_nothing() -> None:
    assert found() == ()


def test_replicas_combine_each_gradient_once_a_step() -> None:
    sent = found(axes={"replicate": 4}, memory={"accumulation": 3}, gradients={"bucket_bytes": WEIGHTS // 4})
    assert sent == (Exchange("replicate", "all_reduce", WEIGHTS / 4, 4),)


@pytest.mark.parametrize(("level", "scatters", "gathers"), [
    ("parameters", 3, 6), ("gradients", 3, 1), ("optimizer", 1, 1)
])  # fmt: skip
def test_shards_gather_and_scatter_as_often_as_their_level_says(level: str, scatters: int, gathers: int) -> None:
    sent = found(axes={"shard": 4, "replicate": 2}, memory={"accumulation": 3, "sharding": level})
    assert total(sent, "shard", "reduce_scatter") == pytest.approx(scatters * WEIGHTS)
    in_blocks = sum(p.bytes for p in traced().parameters if p.names[0].startswith("blocks."))
    rest = gathers // 2 if level == "parameters" else 1  # it waits gathered for its backward pass
    assert total(sent, "shard", "all_gather") == pytest.approx(gathers * in_blocks + rest * (WEIGHTS - in_blocks))
    assert total(sent, "replicate", "all_reduce") == pytest.approx(WEIGHTS / 4)


def test_split_layers_exchange_in_every_microbatch() -> None:
    sent = found(axes={"tensor": 4}, modules={"loss": True}, memory={"accumulation": 3})
    # two a block and pass, the table's forward and the head's backward; four numbers a target
    assert total(sent, "tensor", "all_reduce") == 3 * (ONE * (2 * 2 * LAYERS + 2) + BATCH * LENGTH * 4 * 4)


def test_what_crosses_a_cut_goes_there_and_back() -> None:
    shape: dict[str, Any] = {"cuts": ["blocks.1", "blocks.3"], "microbatches": 6}
    for rank, ways in ((0, 1), (1, 2), (2, 1)):
        sent = found(rank=rank, axes={"pipeline": 3}, pipeline=shape)
        assert sent == (Exchange("pipeline", "point_to_point", BATCH * LENGTH * HIDDEN * 4, 6 * ways),)


def test_a_pipeline_hands_nothing_to_itself() -> None:
    """The two stages in the middle of a V lie on one rank."""
    shape: dict[str, Any] = {"cuts": ["blocks.1", "blocks.2", "blocks.3"], "microbatches": 6, "schedule": "zbv"}
    for rank in (0, 1):
        sent = found(rank=rank, axes={"pipeline": 2}, pipeline=shape)
        assert total(sent, "pipeline", "point_to_point") == 2 * 6 * ONE


def test_a_divided_sequence_is_gathered_for_its_way_over_a_cut() -> None:
    groups: dict[str, Any] = {
        "axes": {"pipeline": 2, "tensor": 4},
        "pipeline": {"cuts": ["blocks.2"], "microbatches": 2},
        "modules": {"sequence": True, "loss": True},
    }
    undivided = {**groups, "modules": {"sequence": False, "loss": True}}
    divided, whole = found(**groups), found(**undivided)
    assert total(divided, "pipeline", "point_to_point") == total(whole, "pipeline", "point_to_point") == 2 * ONE
    assert total(divided, "tensor", "all_gather") > total(whole, "tensor", "all_gather") == 0


def test_shards_of_a_pipeline_stay_gathered_behind_a_backward_pass() -> None:
    shape = {"cuts": ["blocks.2"], "microbatches": 4}
    sent = found(axes={"shard": 4, "pipeline": 2}, pipeline=shape)
    held = total(sent, "shard", "reduce_scatter")  # once a step
    blocks = sum(p.bytes for p in traced().parameters if p.names[0].startswith("blocks.")) / 2
    # of 1f1b with four microbatches: forward 0, 1, backward 0, then forward finds it; each later backward pass
    assert total(sent, "shard", "all_gather") == held - blocks + 5 * blocks


def test_tied_weights_of_a_pipeline_are_summed_once_a_step() -> None:
    with torch.device("meta"):
        tokens = torch.empty(2, LENGTH, dtype=torch.long)
        model = Decoder(layers=2, hidden=HIDDEN, heads=8, sequence=LENGTH, vocabulary=96, tied=True)
    chosen = Plan.model_validate({"axes": {"pipeline": 2}, "pipeline": {"cuts": ["blocks.0"], "microbatches": 2}})
    tied = trace_profile(model, (tokens, tokens), scores_loss, with_structure=True)
    for rank in (0, 1):
        sent = exchanges(tied, chosen, BATCH, pipeline_rank=rank)
        assert Exchange("pipeline", "all_reduce", 96 * HIDDEN * 4, 1) in sent


def test_beside_other_axes_gradients_carry_a_number_a_weight() -> None:
    sent = found(axes={"replicate": 2, "pipeline": 2}, pipeline={"cuts": ["blocks.2"], "microbatches": 2})
    other = found(rank=1, axes={"replicate": 2, "pipeline": 2}, pipeline={"cuts": ["blocks.2"], "microbatches": 2})
    both = sum(total(each, "replicate", "all_reduce") for each in (sent, other))
    assert both == WEIGHTS + 4 * len(traced().parameters)


def test_buffers_go_from_the_first_data_rank_to_the_others() -> None:
    model, batch, loss = small_model("resnet18")
    traced_images = trace_profile(model, batch, loss)
    sent = exchanges(traced_images, Plan.model_validate({"axes": {"replicate": 2, "shard": 2}}), BATCH)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert {Exchange(axis, "broadcast", buffers, 1) for axis in ("replicate", "shard")} <= set(sent)
