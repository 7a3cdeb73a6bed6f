"""The profiles of stages add up to that of the model, and each stage has the weights that it uses."""

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
from tests.soaked import all_but


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


@pytest.mark.parametrize("precision", all_but({"fp32"}, ["fp32", "bf16"]))
@pytest.mark.parametrize("cuts", [("blocks.3",), ("blocks.0", "blocks.2", "blocks.5"), ("embedding",), ("blocks.7",)])
def test_stages_add_up_to_the_model(cuts: tuple[str, ...], precision: str) -> None:
    profile = decoder(precision=precision)
    stages = stage_profiles(profile, cuts)
    assert len(stages) == len(cuts) + 1
    for phase in ("forward", "backward"):
        assert sum(s.profile.flops(4, phase) for s in stages) == profile.flops(4, phase)
    assert sum(s.profile.saved_bytes(4) for s in stages) == profile.saved_bytes(4)
    assert sum(s.profile.parameter_bytes for s in stages) == profile.parameter_bytes
    for stage in stages:
        changes = [
            c.bytes.at(4) * c.tensor_count * s.block_count
            for s in stage.profile.segments
            for c in s.changes
            if c.role != "gradient"
        ]
        assert sum(changes) == pytest.approx(0, abs=16)  # all memory is freed, except the loss


@pytest.mark.soak
@pytest.mark.parametrize("cuts", [("blocks.3",), ("blocks.0", "blocks.2", "blocks.5")])
def test_stages_are_the_same_whether_equal_blocks_are_traced_once_or_all(cuts: tuple[str, ...]) -> None:
    merged, unmerged = stage_profiles(decoder(), cuts), stage_profiles(decoder(merge_equal_blocks=False), cuts)
    for stage, expected in zip(merged, unmerged, strict=True):
        assert stage.profile.flops(4) == expected.profile.flops(4)
        assert stage.profile.saved_bytes(4) == expected.profile.saved_bytes(4)
        assert stage.profile.parameters == expected.profile.parameters


def test_the_activations_at_a_cut_are_sent_and_received() -> None:
    first, second = stage_profiles(decoder(), ("blocks.3",))
    hidden = 16 * 32 * 4
    assert first.sent.at(2) == second.received.at(2) == 2 * hidden
    assert first.received.at(2) == second.sent.at(2) == 0


def test_a_tied_weight_is_on_both_stages() -> None:
    first, second = stage_profiles(decoder(tied=True), ("blocks.3",))
    assert {"embedding.weight"} <= {n for p in first.profile.parameters for n in p.names}
    assert {"embedding.weight"} <= {n for p in second.profile.parameters for n in p.names}


def test_a_cut_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(InputError, match=r"cannot be cut after blocks.9"):
        stage_profiles(decoder(), ("blocks.9",))


@pytest.mark.soak
def test_stages_of_a_model_without_equal_blocks_add_up() -> None:
    model, batch, loss = small_model("resnet18")
    profile: Any = trace_profile(model, batch, loss, with_structure=True)
    cuts = [cut.after for cut in profile.structure.cuts]
    stages = stage_profiles(profile, (cuts[len(cuts) // 2],))
    assert sum(s.profile.flops(4) for s in stages) == profile.flops(4)
    assert all(s.profile.flops(4) > 0 for s in stages)
