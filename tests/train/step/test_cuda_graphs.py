"""A step that does not fit into memory as a CUDA graph runs without one. The device is a stand-in that fails to
capture; test_precision_cuda.py captures on a GPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.batch import ModelBatch
from meshwright.train.step.cuda_graphs import Examples, StepGraphs


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes a CPU look like a device without memory for graphs. Returns what was tried, in order."""
    tried: list[str] = []

    @contextmanager
    def out_of_memory(graph: Any) -> Iterator[None]:
        tried.append("capture")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", out_of_memory)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: tried.append("empty_cache"))
    return tried


def test_too_little_memory_for_a_graph_is_one_warning_and_all_steps_run(captures: list[str]) -> None:
    layer = nn.Linear(3, 1)

    def run_step(examples: Examples, samples: int | None) -> Tensor:
        layer.zero_grad()
        loss: Tensor = layer(examples[0][0].arguments[0]).square().mean()
        loss.backward()
        return loss.detach()

    x = torch.randn(4, 3)
    expected = run_step([(ModelBatch((x,), {}, None), 4)], 4)
    graphs = StepGraphs(run_step, list(layer.parameters()))
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        losses = [graphs([(ModelBatch((x,), {}, None), 4)], 4) for _ in range(8)]
    assert all(torch.equal(loss, expected) for loss in losses)
    assert all(parameter.grad is not None for parameter in layer.parameters())
    assert captures == ["capture", "empty_cache"], "it is tried once, and its memory is returned"
    assert len(raised) == 1
    assert "out of memory" in str(raised[0].message)
    assert "running without CUDA graphs" in str(raised[0].message)
