"""Captures the forward and backward passes of a step as a CUDA graph, and replays the graph for every batch of the same
shapes. The host then launches one graph instead of thousands of kernels. Only for plans of one rank.

A step that cannot be captured runs as without this file, with the same losses and random numbers: what the trial has
changed is put back (graphs/step_state.py, graphs/capture.py)."""

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blocks.failed_module import where_it_failed
from meshwright.model_io.batch import ModelBatch
from meshwright.train.step.batch import map_tensors, tensors_in
from meshwright.train.step.graphs.capture import capture
from meshwright.train.step.graphs.recomputed_randomness import RecomputedRandomness
from meshwright.train.step.graphs.recurrent_dropout import prepare_recurrent_dropout
from meshwright.train.step.graphs.step_state import HostRandomness, StepState
from meshwright.train.torch_private import (
    compiled_generators,
    forget_gradient_accumulators,
    is_refused_compilation,
    without_compiler,
)

Examples = list[tuple[ModelBatch, int]]
# Called with the microbatches, the samples of the global batch, and whether to go on with what is left if the compiler
# fails: not during a capture.
RunStep = Callable[[Examples, int | None, bool], Tensor]
_Key = tuple[Hashable, int | None, tuple[Hashable, ...]]  # shapes, samples of the global batch, constants
_MAX_GRAPHS = 8  # each graph keeps the memory of a step
_WARM_UP_STEPS = 3  # run before a shape is captured, because libraries choose kernels and allocate memory in them


class _HostRandomnessError(Exception):
    """A step draws random numbers on the host, which a graph would repeat."""


@dataclass(frozen=True)
class _CapturedStep:
    """A captured graph, and the tensors that it reads and writes. Their memory stays the same in every replay."""

    graph: torch.cuda.CUDAGraph
    examples: Examples
    gradients: tuple[Tensor | None, ...]
    loss: Tensor
    randomness: RecomputedRandomness


class StepGraphs:
    """Wraps `run_step`, which leaves gradients in the module's parameters and returns the loss. Its calls of a new
    shape run without a graph a few times; then the step is captured, and the graph is replayed. Numbers that become a
    fixed part of a graph, such as the loss scale, are passed as `constants`, because another value needs another
    graph."""

    def __init__(self, run_step: RunStep, module: nn.Module, device: torch.device) -> None:
        self._run_step = run_step
        self._module = module
        self._parameters = list(module.parameters())
        self._device = device
        self._runs: dict[_Key, int] = {}  # how often each key ran without a graph
        self._captured: dict[_Key, _CapturedStep] = {}
        self._stream = _side_stream(device)
        self._generators: list[torch.Generator] = []  # those of compiled code that recomputes layers
        self._where = ""  # the module in which the last capture failed
        self._is_paused = False
        self.failure: str | None = None  # why steps are not captured
        forget_gradient_accumulators(self._parameters)

    def __call__(self, examples: Examples, samples: int | None, *constants: Hashable) -> Tensor:
        key: _Key = (_shapes(examples), samples, constants)
        if key not in self._captured or self._is_paused:
            # Graphs with other constants, such as an earlier loss scale, are unlikely to be needed again.
            self._captured = {old: graph for old, graph in self._captured.items() if old[2] == constants}
            self._runs[key] = self._runs.get(key, 0) + 1
            is_warm = self._runs[key] > _WARM_UP_STEPS
            may_capture = not (self._is_paused or self.failure) and is_warm and len(self._captured) < _MAX_GRAPHS
            if not may_capture or not self._capture(key, examples, samples):
                return self._run_without_graph(examples, samples)
        captured = self._captured[key]
        for (graph_example, _), (example, _) in zip(captured.examples, examples, strict=True):
            for graph_tensor, tensor in zip(_tensors(graph_example), _tensors(example), strict=True):
                graph_tensor.copy_(tensor, non_blocking=True)
        captured.randomness.begin_replay()
        captured.graph.replay()
        for parameter, gradient in zip(self._parameters, captured.gradients, strict=True):
            parameter.grad = gradient
        return captured.loss.clone()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context, steps run without graphs, and none is captured."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _capture(self, key: _Key, examples: Examples, samples: int | None) -> bool:
        """Captures a step. Returns False when that fails; from then on all steps run without graphs."""
        state = StepState(self._module, self._device)
        forget_gradient_accumulators(self._parameters)
        try:
            static = [(ModelBatch(*map_tensors(Tensor.clone, _parts(example))), count) for example, count in examples]
            # On the very tensors that the graph will read, so that whatever depends on them is compiled now.
            randomness = self._rehearse(static, samples, state)
            try:
                self._captured[key] = self._try_capture(static, samples, state, randomness)
            except Exception as error:
                if not is_refused_compilation(error):
                    raise
                randomness = self._rehearse(static, samples, state, pretends=True)
                self._captured[key] = self._try_capture(static, samples, state, randomness)
        except Exception as error:
            # For example, the step reads a value on the host, or a graph of its own memory does not fit beside that of
            # the steps before. It can still run without a graph.
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.failure, self._where = f"the step cannot be captured{self._where} ({reason})", ""
        else:
            return True
        torch.cuda.synchronize()
        state.restore()
        torch.cuda.empty_cache()
        warnings.warn(f"plan.compute.cuda_graphs: {self.failure}, running without CUDA graphs", stacklevel=3)
        return False

    def _rehearse(
        self, examples: Examples, samples: int | None, state: StepState, *, pretends: bool = False
    ) -> RecomputedRandomness:
        """Runs a step without a graph, and puts back what it has changed. With `pretends`, the step sees that a graph
        is captured, as a model may look at it. Returns the random numbers for the graph."""
        randomness = RecomputedRandomness(torch.cuda.default_generators[self._device.index or 0])
        try:
            with randomness.recorded(), _pretending_to_capture() if pretends else nullcontext():
                self._run_without_graph(examples, samples)
        finally:
            state.restore()
        return randomness

    def _try_capture(
        self, examples: Examples, samples: int | None, state: StepState, randomness: RecomputedRandomness
    ) -> _CapturedStep:
        def run() -> tuple[Tensor, tuple[Tensor | None, ...]]:
            host = HostRandomness()
            try:
                with without_compiler(), randomness.captured():
                    loss = self._run_step(examples, samples, False)
                if host.has_changed():
                    raise _HostRandomnessError("the step draws random numbers on the host")
            except Exception as error:
                self._where = where_it_failed(error, self._module)  # now, while the error has its frames
                raise
            state.keep_buffers()
            return loss, tuple(parameter.grad for parameter in self._parameters)

        try:
            prepare_recurrent_dropout(self._module, torch.cuda.default_generators[self._device.index or 0])
            graph, (loss, gradients) = capture(run, self._stream, [*self._generators, *randomness.make_spares()])
        except Exception:
            state.restore()
            torch.clear_autocast_cache()
            raise
        return _CapturedStep(graph, examples, gradients, loss, randomness)

    def _run_without_graph(self, examples: Examples, samples: int | None) -> Tensor:
        """Runs the step on a side stream, as PyTorch requires for the steps before a capture."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), compiled_generators(self._generators):
            loss = self._run_step(examples, samples, True)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream for steps before a capture and for captures. All sessions share it, because libraries keep a
    workspace of tens of megabytes for every stream that they were used on."""
    return torch.cuda.Stream(device)


@contextmanager
def _pretending_to_capture() -> Iterator[None]:
    """Within this context, torch says that a graph is captured."""
    original = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = original


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
