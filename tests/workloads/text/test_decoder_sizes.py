"""The published sizes have the published numbers of parameters."""

import resource

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.errors import InputError
from meshwright.workloads.text.decoder import Decoder, default_feedforward
from meshwright.workloads.text.decoder_sizes import decoder, published_keywords, published_sizes
from tests.soaked import all_but


def on_meta(size: str) -> Decoder:
    with torch.device("meta"):
        return decoder(size)


def parameter_count(size: str) -> int:
    """The number of parameters, computed from the keywords without the model."""
    k = published_keywords(size)
    hidden, vocabulary, bias = k["hidden"], k["vocabulary"], int(k["bias"])
    keys = hidden // k["heads"] * k.get("kv_heads", k["heads"])
    wide = k.get("feedforward", default_feedforward(hidden, k["activation"]))
    matrices = 3 if k["activation"] == "swiglu" else 2
    norm = hidden * (2 if k["norm"] == "layer" and bias else 1)
    attention = 2 * hidden * hidden + 2 * hidden * keys + bias * (2 * hidden + 2 * keys)
    feedforward = matrices * hidden * wide + bias * ((matrices - 1) * wide + hidden)
    table = vocabulary * hidden * (1 if k["tied"] else 2) + (
        k["sequence"] * hidden if k["positions"] == "learned" else 0
    )
    return int(k["layers"] * (attention + feedforward + 2 * norm) + norm + table)


_LARGEST = {"megatron-530B", "1T", "gpt3-175B", "llama3-405B", "llama3-70B", "llama2-70B"}


@pytest.mark.parametrize("size", all_but({*published_sizes()} - _LARGEST, sorted(published_sizes())))
def test_parameters_equal_the_formula_and_the_published_total(size: str) -> None:
    model = on_meta(size)
    total = sum(p.numel() for p in model.parameters())
    assert total == parameter_count(size)
    assert published_sizes()[size]["parameters"] in (None, total)
    assert len(published_sizes()[size]["source"]) > 20


@pytest.mark.parametrize(
    ("size", "billions"),
    [
        ("10M", 0.010),
        ("30M", 0.030),
        ("50M", 0.051),
        ("gpt3-2.7B", 2.7),
        ("gpt3-6.7B", 6.7),
        ("gpt3-13B", 13.0),
        ("megatron-39B", 39.1),
        ("gpt3-175B", 175.0),
        ("megatron-530B", 529.6),
        ("1T", 1008.0),
    ],
)
def test_sizes_without_released_weights_have_about_the_published_total(size: str, billions: float) -> None:
    assert parameter_count(size) / 1e9 == pytest.approx(billions, rel=0.02)


def test_well_known_models_have_their_published_totals() -> None:
    known = {"gpt2": 124_439_808, "gpt2-xl": 1_557_611_200, "llama2-7B": 6_738_415_616, "llama3-8B": 8_030_261_248}
    assert {size: parameter_count(size) for size in known} == known


@pytest.mark.soak
def test_175_billion_parameters_take_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with FakeTensorMode():
        fake = decoder("gpt3-175B")
        assert fake.blocks[95](torch.empty(1, 2048, 12288)).shape == (1, 2048, 12288)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB
    assert sum(p.numel() for p in fake.parameters()) > 174e9


def test_any_keyword_of_a_size_can_be_changed() -> None:
    small = decoder("llama3-8B", layers=1, hidden=64, heads=4, kv_heads=2, vocabulary=100, feedforward=None)
    assert len(small.blocks) == 1
    assert small.head.weight.shape == (100, 64)
    assert decoder(layers=1, hidden=8, heads=2, sequence=4, vocabulary=10).sequence == 4


def test_the_error_for_a_wrong_size_or_keyword_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match="no decoder of size 'llama3-8b': did you mean 'llama3-8B'"):
        decoder("llama3-8b")
    with pytest.raises(InputError, match="has no 'layer': did you mean 'layers'"):
        decoder("gpt2", layer=3)
    with pytest.raises(InputError, match="a decoder needs heads, sequence, vocabulary"):
        decoder(layers=1, hidden=8)
