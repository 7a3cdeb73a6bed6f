"""Stages add up to the model, and each holds what it needs."""

from functools import cache
from typing import Any

import pytest
import torch

from meshwright.errors import InputError
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.pipeline.stages import stage_profiles
from meshwright.workloads.text.decoder import Decoder
from tests.profile.models import scores_loss, small_model


@cache
def decoder(tied: bool = False, merge_equal_blocks: bool = True, precision: str = "fp32") -> ModelProfile:
    with torch.device("meta"):
        tokens = torch.empty(2, 16, dtype=torch.long)
        model = Decoder(layers=8, hidden=32, heads=4, sequence=16, vocabulary=64, tied=tied)
    return trace_profile(
        model,
        (tokens, tokens),
        scores_loss,
        with_structure=True,
        merge_equal_blocks=merge_equal_blocks,
        on_gpu=False,
        precision=precision,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("cuts", [("blocks.3",), ("blocks.0", "blocks.2", "blocks.5"), ("embedding",), ("blocks.7",)])
def test_stages_add_up(cuts: tuple[str, ...], precision: str) -> None:
    found = decoder(precision=precision)
    stages = stage_profiles(found, cuts)
    assert len(stages) == len(cuts) + 1
    for phase in ("forward", "backward"):
        assert sum(s.profile.flops(4, phase) for s in stages) == found.flops(4, phase)
    assert sum(s.profile.saved_bytes(4) for s in stages) == found.saved_bytes(4)
    assert sum(s.profile.parameter_bytes for s in stages) == found.parameter_bytes
    for stage in stages:
        changes = [
            c.bytes.at(4) * c.tensor_count * s.block_count
            for s in stage.profile.segments
            for c in s.changes
            if c.role != "gradient"
        ]
        assert sum(changes) == pytest.approx(0, abs=16)  # all that was taken is given back, but for the loss


@pytest.mark.soak
@pytest.mark.parametrize("cuts", [("blocks.3",), ("blocks.0", "blocks.2", "blocks.5")])
def test_stages_of_blocks_traced_once_are_those_of_all(cuts: tuple[str, ...]) -> None:
    once, every = stage_profiles(decoder(), cuts), stage_profiles(decoder(merge_equal_blocks=False), cuts)
    for one, other in zip(once, every, strict=True):
        assert one.profile.flops(4) == other.profile.flops(4)
        assert one.profile.saved_bytes(4) == other.profile.saved_bytes(4)
        assert one.profile.parameters == other.profile.parameters


def test_what_crosses_a_cut_is_received_and_sent() -> None:
    first, second = stage_profiles(decoder(), ("blocks.3",))
    hidden = 16 * 32 * 4
    assert first.sent.at(2) == second.received.at(2) == 2 * hidden
    assert first.received.at(2) == second.sent.at(2) == 0


def test_a_tied_weight_lies_on_both_stages() -> None:
    first, second = stage_profiles(decoder(tied=True), ("blocks.3",))
    assert {"embedding.weight"} <= {n for p in first.profile.parameters for n in p.names}
    assert {"embedding.weight"} <= {n for p in second.profile.parameters for n in p.names}


def test_a_cut_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match=r"cannot be cut after blocks.9"):
        stage_profiles(decoder(), ("blocks.9",))


def test_a_model_without_equal_blocks() -> None:
    model, batch, loss = small_model("resnet18")
    found: Any = trace_profile(model, batch, loss, with_structure=True)
    after = [cut.after for cut in found.structure.cuts]
    stages = stage_profiles(found, (after[len(after) // 2],))
    assert sum(s.profile.flops(4) for s in stages) == found.flops(4)
    assert all(s.profile.flops(4) > 0 for s in stages)
