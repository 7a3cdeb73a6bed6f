"""Captures the forward and backward passes of a step as a CUDA graph, and replays the graph for every batch of the same
shapes. The host then launches one graph instead of thousands of kernels. Only for plans of one rank."""

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.batch import ModelBatch
from meshwright.train.step.batch import map_tensors, tensors_in

Examples = list[tuple[ModelBatch, int]]
RunStep = Callable[[Examples, int | None], Tensor]
_Key = tuple[Hashable, int | None, tuple[Hashable, ...]]  # shapes, samples of the global batch, constants
_MAX_GRAPHS = 8  # each graph keeps the memory of a step
_WARM_UP_STEPS = 3  # run before a shape is captured, because libraries choose kernels and allocate memory in them


@dataclass(frozen=True)
class _CapturedStep:
    """A captured graph, and the tensors that it reads and writes. Their memory stays the same in every replay."""

    graph: torch.cuda.CUDAGraph
    examples: Examples
    gradients: tuple[Tensor | None, ...]
    loss: Tensor


class StepGraphs:
    """Wraps `run_step`, which leaves gradients in the parameters and returns the loss. Its calls of a new shape run
    without a graph a few times; then the step is captured, and the graph is replayed. Numbers that become a fixed part
    of a graph, such as the loss scale, are passed as `constants`, because another value needs another graph."""

    def __init__(self, run_step: RunStep, parameters: Sequence[nn.Parameter]) -> None:
        self._run_step = run_step
        self._parameters = parameters
        self._runs: dict[_Key, int] = {}  # how often each key ran without a graph
        self._captured: dict[_Key, _CapturedStep] = {}
        self._stream = torch.cuda.Stream()
        self._capture_failed = False

    def __call__(self, examples: Examples, samples: int | None, *constants: Hashable) -> Tensor:
        key: _Key = (_shapes(examples), samples, constants)
        if key not in self._captured:
            # Graphs with other constants, such as an earlier loss scale, are unlikely to be needed again.
            self._captured = {old: graph for old, graph in self._captured.items() if old[2] == constants}
            self._runs[key] = self._runs.get(key, 0) + 1
            is_warm = self._runs[key] > _WARM_UP_STEPS
            may_capture = not self._capture_failed and is_warm and len(self._captured) < _MAX_GRAPHS
            if not may_capture or not self._capture(key, examples, samples):
                return self._run_without_graph(examples, samples)
        captured = self._captured[key]
        for (graph_example, _), (example, _) in zip(captured.examples, examples, strict=True):
            for graph_tensor, tensor in zip(_tensors(graph_example), _tensors(example), strict=True):
                graph_tensor.copy_(tensor, non_blocking=True)
        captured.graph.replay()
        for parameter, gradient in zip(self._parameters, captured.gradients, strict=True):
            parameter.grad = gradient
        return captured.loss.clone()

    def _capture(self, key: _Key, examples: Examples, samples: int | None) -> bool:
        """Captures a step. Returns False when that fails; from then on all steps run without graphs."""
        graph = torch.cuda.CUDAGraph()
        try:
            graph_examples = [
                (ModelBatch(*map_tensors(Tensor.clone, _parts(example))), count) for example, count in examples
            ]
            with torch.cuda.graph(graph):
                loss = self._run_step(graph_examples, samples)
        except Exception as error:
            # For example, the step reads a value on the host, or a graph of its own memory does not fit beside that of
            # the steps before. It can still run without a graph.
            self._capture_failed = True
            torch.cuda.synchronize()
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            message = f"plan.compute.cuda_graphs: the step cannot be captured ({reason}), running without CUDA graphs"
            warnings.warn(message, stacklevel=2)
            for parameter in self._parameters:
                parameter.grad = None
            del graph
            torch.cuda.empty_cache()
            return False
        gradients = tuple(parameter.grad for parameter in self._parameters)
        self._captured[key] = _CapturedStep(graph, graph_examples, gradients, loss)
        return True

    def _run_without_graph(self, examples: Examples, samples: int | None) -> Tensor:
        """Runs the step on a side stream, as PyTorch requires for the steps before a capture."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._run_step(examples, samples)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss


def _parts(example: ModelBatch) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    return example.arguments, example.keywords, example.target


def _tensors(example: ModelBatch) -> list[Tensor]:
    return tensors_in(_parts(example))


def _shapes(examples: Examples) -> Hashable:
    """A hashable key of the examples: their numbers of samples, and the shapes, strides and dtypes of all their
    tensors."""
    return tuple(
        (count, tuple((tuple(t.shape), t.stride(), t.dtype) for t in _tensors(example))) for example, count in examples
    )
