"""A step that cannot be captured runs without a graph, as if nothing had been tried. The device is a stand-in that
fails to capture; test_failed_capture_cuda.py and test_precision_cuda.py capture on a GPU."""

import random
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshwright.model_io.batch import ModelBatch
from meshwright.train.step.cuda_graphs import Examples, StepGraphs
from meshwright.train.step.graphs.step_state import HostRandomness, StepState

CPU = torch.device("cpu")


class FailingGraph:
    """A graph whose capture fails in the way that `error` says when it begins."""

    error: Exception = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    tried: list[str]

    def register_generator_state(self, generator: Any) -> None:
        raise AssertionError("nothing draws random numbers")

    def capture_begin(self, **options: Any) -> None:
        self.tried.append("capture")

    def capture_end(self) -> None:
        self.tried.append("end")

    def reset(self) -> None:
        self.tried.append("reset")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes a CPU look like a device that captures. Returns what was tried, in order."""
    tried: list[str] = []
    FailingGraph.tried = tried
    stream = SimpleNamespace(wait_stream=lambda other: None, device=CPU)
    generator = SimpleNamespace(
        get_offset=lambda: 0,
        graphsafe_get_state=lambda: None,
        graphsafe_set_state=lambda state: None,
        manual_seed=lambda seed: None,
    )
    replaced = {
        "Stream": lambda *_: stream,
        "current_stream": lambda: stream,
        "stream": lambda _: nullcontext(),
        "CUDAGraph": FailingGraph,
        "graph_pool_handle": lambda: (0, 1),
        "synchronize": lambda: None,
        "empty_cache": lambda: tried.append("empty_cache"),
        "default_generators": (generator,),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return tried


class Net(nn.Module):
    """Cannot be captured: its layer raises an error in a step that may not fall back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.is_captured = nn.BatchNorm1d(3), nn.Linear(3, 1), False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x + torch.rand(x.shape) + random.random() + np.random.rand())
        if self.is_captured:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        out: Tensor = self.layer(hidden)
        return out


def train(net: Net, graphs: bool) -> list[Tensor]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)

    def run_step(examples: Examples, samples: int | None, falls_back: bool = True) -> Tensor:
        net.is_captured = not falls_back
        net.zero_grad()
        loss: Tensor = net(examples[0][0].arguments[0]).square().mean()
        loss.backward()
        with torch.no_grad():
            return loss.detach()

    run: Any = StepGraphs(run_step, net, CPU) if graphs else run_step
    x = torch.arange(12.0).reshape(4, 3)
    return [run([(ModelBatch((x,), {}, None), 4)], 4).clone() for _ in range(8)]


def test_a_step_that_cannot_be_captured_leaves_nothing_behind(captures: list[str]) -> None:
    expected_net, net = Net(), Net()
    net.load_state_dict(expected_net.state_dict())
    expected = train(expected_net, graphs=False)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        losses = train(net, graphs=True)
    assert all(torch.equal(loss, other) for loss, other in zip(losses, expected, strict=True))
    for (name, value), other in zip(net.state_dict().items(), expected_net.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
    assert all(parameter.grad is not None for parameter in net.parameters())
    assert captures == ["empty_cache", "capture", "end", "reset", "empty_cache"], "it is tried once"
    (text,) = [str(item.message) for item in raised]
    assert "cannot be captured in the model (Net) (CUDA out of memory" in text
    assert "running without CUDA graphs" in text


def test_the_state_of_a_step_is_put_back() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state, mean = StepState(net, CPU), net[1].running_mean
    drawn = (torch.rand(1), random.random(), np.random.rand())
    net(torch.randn(4, 3)).sum().backward()
    net[1].running_mean = torch.full((3,), 7.0)  # a model may put another tensor there
    state.restore()
    assert net[1].running_mean is mean
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert (torch.rand(1), random.random(), np.random.rand()) == drawn


def test_what_a_step_puts_into_the_place_of_a_buffer_is_kept_in_it() -> None:
    net = nn.BatchNorm1d(3)
    state, mean = StepState(net, CPU), net.running_mean
    net.running_mean = torch.full((3,), 7.0)
    state.keep_buffers()
    assert net.running_mean is mean
    assert torch.equal(mean, torch.full((3,), 7.0))


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, np.random.rand])
def test_random_numbers_of_the_host_are_noticed(draw: Any) -> None:
    host = HostRandomness()
    assert not host.has_changed()
    draw()
    assert host.has_changed()
