"""A rank's share of a split model: as many FLOPs, bytes and parameters as a model built that much narrower."""

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


def plan(**groups: Any) -> Plan:
    return Plan.model_validate(groups)


@cache
def wide_decoder(**more: Any) -> Any:
    with torch.device("meta"):
        return trace_profile(Decoder(**{**WIDE, **more}), tokens(), scores_loss, with_structure=True)


def test_products_and_attention_are_divided_and_nothing_else() -> None:
    whole = wide_decoder()
    half = split_profile(whole, plan(axes={"tensor": 2}))
    assert half.flops(4) == pytest.approx(whole.flops(4) / 2)
    kinds = ("matmul", "attention")
    for segment, divided in zip(whole.segments, half.segments, strict=True):
        for one, part in zip(segment.operators, divided.operators, strict=True):
            expected = 2.0 if one.kind in kinds else 1.0
            if one.kind in kinds or not one.split:
                assert one.flops.at(4) == pytest.approx(part.flops.at(4) * expected), one
            if one.kind == "matmul":
                assert one.bytes.at(4) / 2 < part.bytes.at(4) < one.bytes.at(4)


def test_a_rank_fills_the_gradient_of_its_own_words_alone() -> None:
    """And adds up those of a table that is the head, too, also where casts lie between it and its product. What it is
    asked for stays whole."""
    with torch.device("meta"):
        model = Decoder(**{**WIDE, "tied": True})
    whole = trace_profile(model, tokens(), scores_loss, with_structure=True, precision="bf16")
    half = split_profile(whole, plan(axes={"tensor": 2}))
    pairs = [
        (one, part)
        for segment, divided in zip(whole.segments, half.segments, strict=True)
        for one, part in zip(segment.operators, divided.operators, strict=True)
        if one.layer == "embedding" and not one.split and one.kind in ("embedding", "elementwise")
    ]
    assert {one.name for one, _ in pairs} == {"embedding", "embedding_dense_backward", "add"}
    for one, part in pairs:
        assert part.bytes.constant == one.bytes.constant / 2
        assert part.bytes.linear == one.bytes.linear
        halves = not one.shape[0].linear
        assert part.shape[0].at(4) == one.shape[0].at(4) / (2 if halves else 1)


def test_a_split_model_has_the_weights_of_one_built_narrower() -> None:
    """Half the heads and half the feed-forward features, hidden size unchanged: what a rank of two holds."""
    half = split_profile(wide_decoder(), plan(axes={"tensor": 2}))
    shapes = {p.names[0]: p.shape for p in half.parameters}
    assert shapes["blocks.0.attention.q.weight"] == (32, 64)
    assert shapes["blocks.3.attention.o.weight"] == (64, 32)
    assert shapes["blocks.5.feedforward.up.weight"] == (128, 64)
    assert shapes["blocks.5.feedforward.down.weight"] == (64, 128)
    assert shapes["blocks.0.attention.q.bias"] == (32,)
    assert shapes["embedding.weight"] == (48, 64)
    assert shapes["blocks.0.norm1.weight"] == (64,)


def test_activations_inside_groups_are_divided_and_with_sequence_and_loss_the_others_too() -> None:
    whole = wide_decoder()
    saved = {
        name: split_profile(whole, plan(axes={"tensor": 4}, modules=modules)).saved_bytes(4)
        for name, modules in {
            "tensor": {},
            "sequence": {"sequence": True},
            "loss": {"sequence": True, "loss": True},
        }.items()
    }
    assert whole.saved_bytes(4) > saved["tensor"] > saved["sequence"] > saved["loss"] > whole.saved_bytes(4) / 4
    scores = 4 * 32 * 96 * 4  # log-probabilities of every token, in fp32
    assert saved["sequence"] - saved["loss"] == pytest.approx(scores * 3 / 4)


def test_heads_that_ranks_do_not_divide_stay_whole_unless_asked_for() -> None:
    found = wide_decoder(heads=4, kv_heads=2)
    assert "blocks.0.attention.q" not in split_shares(found, plan(axes={"tensor": 4}))
    assert "blocks.0.feedforward.up" in split_shares(found, plan(axes={"tensor": 4}))
    asked = plan(axes={"tensor": 4}, modules={"splits": {"blocks.*.attention.q": {"kind": "column"}}})
    with pytest.raises(InputError, match=r"blocks.0.attention.q cannot be split over 4 ranks: they must divide 2"):
        split_shares(found, asked)


def test_a_module_can_be_left_whole() -> None:
    found = wide_decoder()
    left = plan(axes={"tensor": 2}, modules={"splits": {"blocks.*.feedforward.up": {"kind": "none"}}})
    assert not any("feedforward" in name for name in split_shares(found, left))
    assert any("attention" in name for name in split_shares(found, left))


def test_layers_split_over_the_replicate_axis_hold_less_and_do_as_much() -> None:
    model, batch, loss = small_model("vgg")
    found = trace_profile(model, batch, loss, with_structure=True)
    assert found.structure is not None
    group = found.structure.splits[0]
    wide = {split.module: {"kind": split.kind, "axis": "replicate"} for split in group.splits}
    divided = split_profile(found, plan(axes={"replicate": 2}, modules={"splits": wide}))
    assert divided.flops(4) == found.flops(4)
    weights = {split.parameter for split in group.splits}
    before = sum(p.bytes for p in found.parameters if p.names[0] in weights)
    assert found.parameter_bytes - divided.parameter_bytes >= before / 2


def test_precision_does_not_hide_a_split() -> None:
    found = wide_decoder()
    with torch.device("meta"):
        low = trace_profile(Decoder(**WIDE), tokens(), scores_loss, with_structure=True, precision="bf16")
    divided = {o.split for s in found.segments for o in s.operators}
    assert {o.split for s in low.segments for o in s.operators} == divided
    half = split_profile(low, plan(axes={"tensor": 2}))
    assert half.flops(4) == pytest.approx(low.flops(4) / 2)
    copies = [sum(_constants(found)) for found in (low, half)]  # weights that autocast has cast
    assert copies[1] < 0.6 * copies[0]


def _constants(found: Any) -> list[float]:
    return [
        c.bytes.constant * s.block_count
        for s in found.segments
        for c in s.changes
        if s.phase == "forward" and c.role == "saved" and c.bytes.constant > 0 and not c.bytes.linear
    ]
