"""A rank of a split model has the FLOPs, bytes and parameters of a model that is as much narrower."""

from functools import cache
from typing import Any

import pytest
import torch

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.profile.tracing.trace import trace_profile
from meshwright.simulator.tensor.split_profile import split_profile, split_shares
from meshwright.workloads.text.decoder import Decoder
from tests.profile.models import scores_loss, small_model

WIDE: dict[str, Any] = {
    "layers": 6,
    "hidden": 64,
    "heads": 8,
    "sequence": 32,
    "vocabulary": 96,
    "feedforward": 256,
    "tied": False,
}


def tokens() -> Any:
    with torch.device("meta"):
        batch = torch.empty(2, 32, dtype=torch.long)
    return batch, batch


def make_plan(**groups: Any) -> Plan:
    return Plan.model_validate(groups)


@cache
def wide_decoder(**sizes: Any) -> Any:
    with torch.device("meta"):
        return trace_profile(Decoder(**{**WIDE, **sizes}), tokens(), scores_loss, with_structure=True)


def test_only_products_and_attention_are_divided() -> None:
    whole = wide_decoder()
    half = split_profile(whole, make_plan(axes={"tensor": 2}))
    assert half.flops(4) == pytest.approx(whole.flops(4) / 2)
    kinds = ("matmul", "attention")
    for segment, divided in zip(whole.segments, half.segments, strict=True):
        for operator, part in zip(segment.operators, divided.operators, strict=True):
            expected = 2.0 if operator.kind in kinds else 1.0
            if operator.kind in kinds or not operator.split:
                assert operator.flops.at(4) == pytest.approx(part.flops.at(4) * expected), operator
            if operator.kind == "matmul":
                assert operator.bytes.at(4) / 2 < part.bytes.at(4) < operator.bytes.at(4)


def test_a_rank_fills_the_gradient_of_its_own_words_only() -> None:
    """A table that is also the weight of the head adds up both gradients, also where autocast casts it. The number of
    looked-up words is not divided."""
    with torch.device("meta"):
        model = Decoder(**{**WIDE, "tied": True})
    whole = trace_profile(model, tokens(), scores_loss, with_structure=True, precision="bf16")
    half = split_profile(whole, make_plan(axes={"tensor": 2}))
    pairs = [
        (operator, part)
        for segment, divided in zip(whole.segments, half.segments, strict=True)
        for operator, part in zip(segment.operators, divided.operators, strict=True)
        if operator.layer == "embedding" and not operator.split and operator.kind in ("embedding", "elementwise")
    ]
    assert {operator.name for operator, _ in pairs} == {"embedding", "embedding_dense_backward", "add"}
    for operator, part in pairs:
        assert part.bytes.constant == operator.bytes.constant / 2
        assert part.bytes.linear == operator.bytes.linear
        halves = not operator.shape[0].linear
        assert part.shape[0].at(4) == operator.shape[0].at(4) / (2 if halves else 1)


def test_a_split_model_has_the_weights_of_one_built_narrower() -> None:
    """A rank of two holds half the heads and half the feed-forward features; the hidden size is unchanged."""
    half = split_profile(wide_decoder(), make_plan(axes={"tensor": 2}))
    shapes = {p.names[0]: p.shape for p in half.parameters}
    assert shapes["blocks.0.attention.q.weight"] == (32, 64)
    assert shapes["blocks.3.attention.o.weight"] == (64, 32)
    assert shapes["blocks.5.feedforward.up.weight"] == (128, 64)
    assert shapes["blocks.5.feedforward.down.weight"] == (64, 128)
    assert shapes["blocks.0.attention.q.bias"] == (32,)
    assert shapes["embedding.weight"] == (48, 64)
    assert shapes["blocks.0.norm1.weight"] == (64,)


def test_sequence_and_loss_divide_the_activations_outside_of_split_groups() -> None:
    whole = wide_decoder()
    saved = {
        name: split_profile(whole, make_plan(axes={"tensor": 4}, modules=modules)).saved_bytes(4)
        for name, modules in {
            "tensor": {},
            "sequence": {"sequence": True},
            "loss": {"sequence": True, "loss": True},
        }.items()
    }
    assert whole.saved_bytes(4) > saved["tensor"] > saved["sequence"] > saved["loss"] > whole.saved_bytes(4) / 4
    scores = 4 * 32 * 96 * 4  # log-probabilities of every token, in fp32
    assert saved["sequence"] - saved["loss"] == pytest.approx(scores * 3 / 4)


def test_heads_that_ranks_do_not_divide_are_not_split_or_refused() -> None:
    profile = wide_decoder(heads=4, kv_heads=2)
    assert "blocks.0.attention.q" not in split_shares(profile, make_plan(axes={"tensor": 4}))
    assert "blocks.0.feedforward.up" in split_shares(profile, make_plan(axes={"tensor": 4}))
    explicit_split = make_plan(axes={"tensor": 4}, modules={"splits": {"blocks.*.attention.q": {"kind": "column"}}})
    with pytest.raises(InputError, match=r"blocks.0.attention.q cannot be split over 4 ranks: they must divide 2"):
        split_shares(profile, explicit_split)


def test_a_plan_can_exclude_a_module_from_splitting() -> None:
    profile = wide_decoder()
    without_feedforward = make_plan(
        axes={"tensor": 2}, modules={"splits": {"blocks.*.feedforward.up": {"kind": "none"}}}
    )
    assert not any("feedforward" in name for name in split_shares(profile, without_feedforward))
    assert any("attention" in name for name in split_shares(profile, without_feedforward))


def test_layers_split_over_the_replicate_axis_hold_fewer_weights_and_compute_as_much() -> None:
    model, batch, loss = small_model("vgg")
    profile = trace_profile(model, batch, loss, with_structure=True)
    assert profile.structure is not None
    group = profile.structure.splits[0]
    splits = {split.module: {"kind": split.kind, "axis": "replicate"} for split in group.splits}
    divided = split_profile(profile, make_plan(axes={"replicate": 2}, modules={"splits": splits}))
    assert divided.flops(4) == profile.flops(4)
    weights = {split.parameter for split in group.splits}
    before = sum(p.bytes for p in profile.parameters if p.names[0] in weights)
    assert profile.parameter_bytes - divided.parameter_bytes >= before / 2


@pytest.mark.soak
def test_splits_are_the_same_in_low_precision() -> None:
    profile = wide_decoder()
    with torch.device("meta"):
        low = trace_profile(Decoder(**WIDE), tokens(), scores_loss, with_structure=True, precision="bf16")
    divided = {o.split for s in profile.segments for o in s.operators}
    assert {o.split for s in low.segments for o in s.operators} == divided
    half = split_profile(low, make_plan(axes={"tensor": 2}))
    assert half.flops(4) == pytest.approx(low.flops(4) / 2)
    cast_bytes = [sum(_saved_constants(profile)) for profile in (low, half)]  # weights that autocast has cast
    assert cast_bytes[1] < 0.6 * cast_bytes[0]


def _saved_constants(profile: Any) -> list[float]:
    """Returns the bytes of saved tensors whose size does not depend on the batch."""
    return [
        c.bytes.constant * s.block_count
        for s in profile.segments
        for c in s.changes
        if s.phase == "forward" and c.role == "saved" and c.bytes.constant > 0 and not c.bytes.linear
    ]
