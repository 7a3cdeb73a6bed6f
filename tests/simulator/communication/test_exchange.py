"""The messages between ranks have the closed forms of a GPT block and of data-parallel training."""

from functools import cache
from typing import Any

import pytest
import torch

from meshwright.cluster.names import cluster_from_name
from meshwright.plan import Plan
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.communication.collectives import collective_s
from meshwright.simulator.communication.exchange import batch_norm_messages, gradient_exchange, transfer_s
from meshwright.simulator.communication.placement import group_of_axes
from meshwright.simulator.pipeline.stages import stage_profiles
from meshwright.simulator.runtime import OUR_RUNTIME
from meshwright.simulator.tensor.messages import TensorMessage, tensor_messages
from meshwright.workloads.text.decoder import Decoder
from tests.profile.models import scores_loss, small_model
from tests.soaked import all_but

LAYERS, HIDDEN, LENGTH, BATCH = 6, 64, 32, 4
ONE = BATCH * LENGTH * HIDDEN * 4  # bytes of b · s · h in fp32


@cache
def traced(recompute: str = "none") -> ModelProfile:
    with torch.device("meta"):
        tokens = torch.empty(2, LENGTH, dtype=torch.long)
        model = Decoder(layers=LAYERS, hidden=HIDDEN, heads=8, sequence=LENGTH, vocabulary=96, tied=False)
    kind: Any = recompute
    return trace_profile(model, (tokens, tokens), scores_loss, recompute=kind, with_structure=True)


def make_plan(**groups: Any) -> Plan:
    return Plan.model_validate(groups)


def block_message_count(messages: list[TensorMessage], collective: str, forward: bool) -> int:
    """Returns how many messages of b · s · h the blocks send, without the one of the embedding or the head."""
    return sum(m.times for m in messages if (m.collective, m.forward) == (collective, forward) and m.bytes == ONE) - 1


@pytest.mark.parametrize(("recompute", "backward"), all_but([("none", 2)], [("none", 2), ("full", 4)]))
def test_a_block_sums_twice_forward_and_twice_backward(recompute: str, backward: int) -> None:
    plan = make_plan(axes={"tensor": 4}, modules={"loss": True}, memory={"recompute": recompute})
    along, wide = tensor_messages(traced(recompute), plan, BATCH)
    assert wide == []
    assert block_message_count(along, "all_reduce", True) == 2 * LAYERS
    assert block_message_count(along, "all_reduce", False) == backward * LAYERS


def test_a_divided_sequence_gathers_and_scatters_instead() -> None:
    along, _ = tensor_messages(traced(), make_plan(axes={"tensor": 4}, modules={"sequence": True, "loss": True}), BATCH)
    for forward in (True, False):
        for collective in ("all_gather", "reduce_scatter"):
            count = sum(m.times for m in along if (m.collective, m.forward, m.bytes) == (collective, forward, ONE))
            assert count == 2 * LAYERS + 1  # the embedding, or the head
    norms, biases = 2 * LAYERS + 1, 2 * LAYERS  # of row layers; a rank has their gradients for its tokens only
    whole = sum(m.bytes * m.times for m in along if (m.collective, m.forward) == ("all_reduce", False))
    assert whole == (2 * norms + biases) * HIDDEN * 4


def test_activations_are_not_divided_before_the_first_split_layer_of_a_stage() -> None:
    """After a cut the first column layer has an undivided input, and the residual connection is divided there, too."""
    cut = Plan.model_validate({
        "axes": {"tensor": 4, "pipeline": 2},
        "modules": {"sequence": True, "loss": True},
        "pipeline": {"cuts": ["blocks.2"], "microbatches": 2},
    })  # fmt: skip
    first, last = (tensor_messages(part.profile, cut, BATCH)[0] for part in stage_profiles(traced(), ("blocks.2",)))

    def times(messages: list[TensorMessage], collective: str, forward: bool) -> int:
        return sum(m.times for m in messages if (m.collective, m.forward, m.bytes) == (collective, forward, ONE))

    half = LAYERS  # two per block, in half of the blocks
    assert [times(first, "all_gather", forward) for forward in (True, False)] == [half, half + 1]
    assert [times(last, "all_gather", forward) for forward in (True, False)] == [half - 1 + 1, half + 1]
    assert times(last, "all_reduce", False) == 1


def test_rows_that_ranks_do_not_divide_are_padded() -> None:
    along, _ = tensor_messages(traced(), make_plan(axes={"tensor": 5}), BATCH)
    assert TensorMessage("all_gather", BATCH * LENGTH * 100 * 4, 1, True) in along  # 96 words, padded to 20 per rank


def test_selective_recomputation_repeats_forward_messages() -> None:
    plan = make_plan(axes={"tensor": 4}, memory={"recompute": "selective"})
    along, _ = tensor_messages(traced(), plan, BATCH)
    assert block_message_count(along, "all_reduce", False) == 4 * LAYERS


def test_synchronized_batch_norm_sends_a_few_numbers_per_channel() -> None:
    model, batch, loss = small_model("resnet18")
    profile = trace_profile(model, batch, loss)
    synchronized = make_plan(axes={"replicate": 2, "shard": 2}, numerics={"batch_norm": "synchronized"})
    sent = batch_norm_messages(profile, synchronized)
    layers = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    gathered = sum(m.bytes * m.times for m in sent if m.collective == "all_gather")
    assert gathered == 4 * 4 * sum(2 * layer.num_features + 1 for layer in layers)
    assert sum(m.bytes * m.times for m in sent if not m.forward) == 4 * 2 * sum(layer.num_features for layer in layers)
    assert batch_norm_messages(profile, make_plan(axes={"replicate": 2})) == []


def test_without_a_tensor_axis_nothing_is_sent() -> None:
    assert tensor_messages(traced(), make_plan(axes={"replicate": 4}), BATCH) == ([], [])


def test_layers_split_over_replicas_gather_the_samples_of_all_replicas() -> None:
    splits = {"blocks.*.feedforward.up": {"kind": "column", "axis": "replicate"},
              "blocks.*.feedforward.down": {"kind": "row", "axis": "replicate"}}  # fmt: skip
    along, wide = tensor_messages(traced(), make_plan(axes={"replicate": 4}, modules={"splits": splits}), BATCH)
    assert along == []
    assert {m.bytes for m in wide} == {4 * ONE}
    assert sum(m.times for m in wide if m.forward) == 2 * LAYERS


def test_a_split_group_reduces_its_output_forward_and_its_input_backward() -> None:
    """The group is the first two layers of VGG's classifier, whose input is larger than their output."""
    model, batch, loss = small_model("vgg")
    profile = trace_profile(model, batch, loss, with_structure=True)
    assert profile.structure is not None
    (first, *_, last) = profile.structure.splits[0].splits
    shapes = {p.names[0]: p.shape for p in profile.parameters}
    input_bytes, output_bytes = (BATCH * 4 * size for size in (shapes[first.parameter][1], shapes[last.parameter][0]))
    along, _ = tensor_messages(profile, make_plan(axes={"tensor": 2}), BATCH)
    assert TensorMessage("all_reduce", output_bytes, 1, True) in along
    assert TensorMessage("all_reduce", input_bytes, 1, False) in along
    assert input_bytes != output_bytes


def test_gradients_are_summed_in_buckets() -> None:
    cluster = cluster_from_name("8xA100-80GB")
    plan = make_plan(axes={"replicate": 8}, gradients={"bucket_bytes": 2**20})
    exchange = gradient_exchange(8 * 2**20, LAYERS, plan, cluster, OUR_RUNTIME)
    bucket_s = collective_s("all_reduce", 2**20, group_of_axes(plan.axes, ("replicate",), cluster), cluster)
    assert exchange.pieces == 8
    assert exchange.replicate_s == pytest.approx(8 * bucket_s)
    assert exchange.scatter_s == exchange.gather_s == 0


@pytest.mark.parametrize("axes", [{"shard": 8}, {"shard": 4, "replicate": 2}])
def test_gradients_of_frozen_weights_are_not_exchanged(axes: dict[str, int]) -> None:
    cluster, plan = cluster_from_name("8xA100-80GB"), make_plan(axes=axes)
    whole = gradient_exchange(2**30, LAYERS, plan, cluster, OUR_RUNTIME)
    adapters = gradient_exchange(2**30, LAYERS, plan, cluster, OUR_RUNTIME, trained_bytes=2**20)
    small = gradient_exchange(2**20, LAYERS, plan, cluster, OUR_RUNTIME)
    assert adapters.gather_s == whole.gather_s
    assert (adapters.scatter_s, adapters.replicate_s) == (small.scatter_s, small.replicate_s)
    nothing = gradient_exchange(2**30, LAYERS, plan, cluster, OUR_RUNTIME, trained_bytes=0)
    assert nothing.scatter_s == nothing.replicate_s == 0


def test_transfers_between_stages_are_faster_within_a_node() -> None:
    cluster, plan = cluster_from_name("2x4xV100-32GB@OmniPath-100G"), make_plan(axes={"pipeline": 4, "replicate": 2})
    transfers = [transfer_s(2.0**23, plan, cluster, OUR_RUNTIME, rank) for rank in range(4)]
    assert transfers[0] == transfers[2], "both pairs of stages are each on one node"
    # From the second stage to the third, and from the last to the first, which interleaved stages need.
    assert transfers[1] == transfers[3] > 5 * transfers[0]


def test_a_plan_without_a_pipeline_sends_nothing_over_cuts() -> None:
    assert transfer_s(2.0**30, make_plan(axes={"tensor": 8}), cluster_from_name("2x8xA100-80GB"), OUR_RUNTIME) == 0
