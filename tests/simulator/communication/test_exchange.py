"""What ranks send each other: the closed forms of a GPT block, and of data parallel training."""

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

LAYERS, HIDDEN, LENGTH, BATCH = 6, 64, 32, 4
ONE = BATCH * LENGTH * HIDDEN * 4  # bytes of b · s · h in fp32


@cache
def traced(recompute: str = "none") -> ModelProfile:
    with torch.device("meta"):
        tokens = torch.empty(2, LENGTH, dtype=torch.long)
        model = Decoder(layers=LAYERS, hidden=HIDDEN, heads=8, sequence=LENGTH, vocabulary=96, tied=False)
    kind: Any = recompute
    return trace_profile(model, (tokens, tokens), scores_loss, recompute=kind, with_structure=True)


def plan(**groups: Any) -> Plan:
    return Plan.model_validate(groups)


def of_blocks(messages: list[TensorMessage], collective: str, forward: bool) -> int:
    """How often b · s · h is sent in the blocks: the table's and the head's are sent once."""
    return sum(m.times for m in messages if (m.collective, m.forward) == (collective, forward) and m.bytes == ONE) - 1


@pytest.mark.parametrize(("recompute", "backward"), [("none", 2), ("full", 4)])
def test_a_block_sums_twice_forward_and_twice_backward(recompute: str, backward: int) -> None:
    chosen = plan(axes={"tensor": 4}, modules={"loss": True}, memory={"recompute": recompute})
    along, wide = tensor_messages(traced(recompute), chosen, BATCH)
    assert wide == []
    assert of_blocks(along, "all_reduce", True) == 2 * LAYERS
    assert of_blocks(along, "all_reduce", False) == backward * LAYERS


def test_a_divided_sequence_gathers_and_scatters_instead() -> None:
    along, _ = tensor_messages(traced(), plan(axes={"tensor": 4}, modules={"sequence": True, "loss": True}), BATCH)
    for forward in (True, False):
        for collective in ("all_gather", "reduce_scatter"):
            found = sum(m.times for m in along if (m.collective, m.forward, m.bytes) == (collective, forward, ONE))
            assert found == 2 * LAYERS + 1  # the table, or the head
    norms, biases = 2 * LAYERS + 1, 2 * LAYERS  # of rows; their gradients are of a rank's tokens
    whole = sum(m.bytes * m.times for m in along if (m.collective, m.forward) == ("all_reduce", False))
    assert whole == (2 * norms + biases) * HIDDEN * 4


def test_values_are_whole_up_to_the_first_layer_that_divides_them() -> None:
    """Behind a cut: the first column has a whole input, and the residual beside it is divided, too."""
    cut = Plan.model_validate({
        "axes": {"tensor": 4, "pipeline": 2},
        "modules": {"sequence": True, "loss": True},
        "pipeline": {"cuts": ["blocks.2"], "microbatches": 2},
    })  # fmt: skip
    first, last = (tensor_messages(part.profile, cut, BATCH)[0] for part in stage_profiles(traced(), ("blocks.2",)))

    def times(messages: list[TensorMessage], collective: str, forward: bool) -> int:
        return sum(m.times for m in messages if (m.collective, m.forward, m.bytes) == (collective, forward, ONE))

    half = LAYERS  # two a block, in half of the blocks
    assert [times(first, "all_gather", way) for way in (True, False)] == [half, half + 1]
    assert [times(last, "all_gather", way) for way in (True, False)] == [half - 1 + 1, half + 1]
    assert times(last, "all_reduce", False) == 1


def test_what_ranks_do_not_divide_travels_with_room() -> None:
    along, _ = tensor_messages(traced(), plan(axes={"tensor": 5}), BATCH)
    assert TensorMessage("all_gather", BATCH * LENGTH * 100 * 4, 1, True) in along  # of 96 words, 20 a rank


def test_selective_recomputation_sends_again() -> None:
    chosen = plan(axes={"tensor": 4}, memory={"recompute": "selective"})
    ours, _ = tensor_messages(traced(), chosen, BATCH)
    assert of_blocks(ours, "all_reduce", False) == 4 * LAYERS


def test_synchronized_statistics_are_numbers_of_channels() -> None:
    model, batch, loss = small_model("resnet18")
    found = trace_profile(model, batch, loss)
    together = plan(axes={"replicate": 2, "shard": 2}, numerics={"batch_norm": "synchronized"})
    sent = batch_norm_messages(found, together)
    layers = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    gathered = sum(m.bytes * m.times for m in sent if m.collective == "all_gather")
    assert gathered == 4 * 4 * sum(2 * layer.num_features + 1 for layer in layers)
    assert sum(m.bytes * m.times for m in sent if not m.forward) == 4 * 2 * sum(layer.num_features for layer in layers)
    assert batch_norm_messages(found, plan(axes={"replicate": 2})) == []


def test_without_a_tensor_axis_nothing_is_sent() -> None:
    assert tensor_messages(traced(), plan(axes={"replicate": 4}), BATCH) == ([], [])


def test_layers_split_over_replicas_gather_the_samples_of_all() -> None:
    splits = {"blocks.*.feedforward.up": {"kind": "column", "axis": "replicate"},
              "blocks.*.feedforward.down": {"kind": "row", "axis": "replicate"}}  # fmt: skip
    along, wide = tensor_messages(traced(), plan(axes={"replicate": 4}, modules={"splits": splits}), BATCH)
    assert along == []
    assert {m.bytes for m in wide} == {4 * ONE}
    assert sum(m.times for m in wide if m.forward) == 2 * LAYERS


def test_a_group_combines_its_own_input_and_output() -> None:
    """VGG's first two layers, whose input is larger than their output."""
    model, batch, loss = small_model("vgg")
    found = trace_profile(model, batch, loss, with_structure=True)
    assert found.structure is not None
    (first, *_, last) = found.structure.splits[0].splits
    shapes = {p.names[0]: p.shape for p in found.parameters}
    given, made = (BATCH * 4 * size for size in (shapes[first.parameter][1], shapes[last.parameter][0]))
    along, _ = tensor_messages(found, plan(axes={"tensor": 2}), BATCH)
    assert TensorMessage("all_reduce", made, 1, True) in along
    assert TensorMessage("all_reduce", given, 1, False) in along
    assert given != made


def test_gradients_are_summed_in_buckets() -> None:
    cluster, chosen = cluster_from_name("8xA100-80GB"), plan(axes={"replicate": 8}, gradients={"bucket_bytes": 2**20})
    found = gradient_exchange(8 * 2**20, LAYERS, chosen, cluster, OUR_RUNTIME)
    bucket_s = collective_s("all_reduce", 2**20, group_of_axes(chosen.axes, ("replicate",), cluster), cluster)
    assert found.pieces == 8
    assert found.replicate_s == pytest.approx(8 * bucket_s)
    assert found.scatter_s == found.gather_s == 0


def test_stages_on_one_node_hand_over_faster_than_across_nodes() -> None:
    cluster, chosen = cluster_from_name("2x4xV100-32GB@OmniPath-100G"), plan(axes={"pipeline": 4, "replicate": 2})
    ways = [transfer_s(2.0**23, chosen, cluster, OUR_RUNTIME, rank) for rank in range(4)]
    assert ways[0] == ways[2], "ranks 0 to 3 on the first node, two stages of them; the others on the second"
    assert ways[1] == ways[3] > 5 * ways[0], "from the second to the third, and where chunks go round, to the first"


def test_a_plan_without_a_pipeline_sends_nothing_over_cuts() -> None:
    assert transfer_s(2.0**30, plan(axes={"tensor": 8}), cluster_from_name("2x8xA100-80GB"), OUR_RUNTIME) == 0
