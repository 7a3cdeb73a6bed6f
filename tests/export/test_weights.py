"""Safetensors files use the model's names; in bf16 only parameters are rounded."""

from pathlib import Path

import torch
from safetensors import safe_open

from meshwright.export.weights import copy_in_bf16, read_weights, size_bytes, write_weights
from meshwright.workloads.text.decoder import Decoder
from tests.train.toy import Net


def test_tied_weights_are_written_once_and_are_tied_again_when_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Decoder(layers=1, hidden=8, heads=2, sequence=4, vocabulary=20)
    write_weights(model, tmp_path / "it.safetensors", {"job": "toy", "step": "3"})
    with safe_open(tmp_path / "it.safetensors", "pt") as opened:
        assert opened.metadata() == {"job": "toy", "step": "3", "head.weight": "embedding.weight"}
        assert "head.weight" not in opened.keys()  # noqa: SIM118 (it is no dict)
    other = Decoder(layers=1, hidden=8, heads=2, sequence=4, vocabulary=20)
    read_weights(other, tmp_path / "it.safetensors")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
    assert other.head.weight is other.embedding.weight
    assert size_bytes(model) == sum(4 * parameter.numel() for parameter in model.parameters())


def test_buffers_are_not_rounded(tmp_path: Path) -> None:
    model = Net()
    model(torch.randn(8, 20))
    state = copy_in_bf16(model).state_dict()
    buffers = dict(model.named_buffers())
    assert all(torch.equal(state[name], value) and state[name].dtype == value.dtype for name, value in buffers.items())
    assert all(state[name].dtype == torch.bfloat16 for name, _ in model.named_parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    write_weights(copy_in_bf16(model), tmp_path / "it.safetensors", {})
    assert {p.dtype for p in read_weights(Net(), tmp_path / "it.safetensors").parameters()} == {torch.float32}
