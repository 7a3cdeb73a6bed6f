"""A trace for a GPU has the operators of a GPU where the CPU runs others."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile


class WithDropout(nn.Module):
    """Calls dropout in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 8)
        self.module = nn.Dropout(0.1, inplace=kind == "in place")
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.kind == "functional":
            hidden = F.dropout(hidden, 0.1, self.training)
        elif self.kind == "torch":
            hidden = torch.dropout(hidden, 0.1, train=True)
        elif self.kind == "none":
            hidden = F.dropout(hidden, p=0.0, training=True)
        elif self.kind == "off":
            hidden = F.dropout(hidden, 0.1, training=False)
        else:
            hidden = self.module(hidden)
        out: Tensor = self.last(hidden)
        return out


def _profile(kind: str, on_gpu: bool = True) -> ModelProfile:
    batch = (torch.randn(2, 64), torch.zeros(2, dtype=torch.long))
    return trace_profile(WithDropout(kind), batch, F.cross_entropy, on_gpu=on_gpu)


def _operator_names(profile: ModelProfile) -> set[str]:
    return {operator.name for segment in profile.segments for operator in segment.operators}


@pytest.mark.parametrize("kind", ["module", "functional", "torch"])
def test_dropout_is_one_operator_that_saves_one_byte_per_element(kind: str) -> None:
    gpu, cpu = _profile(kind), _profile(kind, on_gpu=False)
    assert {"native_dropout", "native_dropout_backward"} <= _operator_names(gpu)
    assert "bernoulli_" not in _operator_names(gpu)
    assert "bernoulli_" in _operator_names(cpu)
    assert cpu.saved_bytes(10) - gpu.saved_bytes(10) == 10 * 64 * (4 - 1)


def test_dropout_in_place_is_several_operators_on_a_gpu_too() -> None:
    assert "bernoulli_" in _operator_names(_profile("in place"))


@pytest.mark.parametrize("kind", ["none", "off"])
def test_dropout_that_drops_nothing_is_not_replaced(kind: str) -> None:
    assert "native_dropout" not in _operator_names(_profile(kind))
    assert _profile(kind).saved_bytes(10) == _profile(kind, on_gpu=False).saved_bytes(10)
