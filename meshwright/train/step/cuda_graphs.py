"""Forward and backward of a step, recorded once as a CUDA graph and repeated for every batch of the same shapes: the
host tells the GPU one thing instead of thousands. For plans of one rank."""

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from meshwright.batch import Example

Examples = list[tuple[Example, int]]
Compute = Callable[[Examples, int | None], Tensor]
_Key = tuple[Hashable, int | None, tuple[Hashable, ...]]  # shapes, samples of the global batch, constants
_MOST = 8  # shapes that are recorded: each graph keeps the memory of a step
_WARM_UP = 3  # steps of a shape before it is recorded: libraries choose their kernels, and allocate


@dataclass(frozen=True)
class _Recorded:
    """What the graph reads and writes, always in the same memory."""

    graph: torch.cuda.CUDAGraph
    examples: Examples
    gradients: tuple[Tensor | None, ...]
    loss: Tensor


class Graphs:
    """Stands in for `compute`, which leaves gradients in the parameters and returns the loss. What a graph would hold
    fast, such as a factor on the loss, is given as `constants`: another value makes another graph."""

    def __init__(self, compute: Compute, parameters: Sequence[nn.Parameter]) -> None:
        self._compute = compute
        self._parameters = parameters
        self._seen: dict[_Key, int] = {}
        self._known: dict[_Key, _Recorded] = {}
        self._stream = torch.cuda.Stream()
        self._fails = False

    def __call__(self, examples: Examples, samples: int | None, *constants: Hashable) -> Tensor:
        key: _Key = (_shapes(examples), samples, constants)
        if key not in self._known:
            # With another constant the old ones are not likely to come again.
            self._known = {known: graph for known, graph in self._known.items() if known[2] == constants}
            self._seen[key] = self._seen.get(key, 0) + 1
            ready = not self._fails and self._seen[key] > _WARM_UP and len(self._known) < _MOST
            if not ready or not self._record(key, examples, samples):
                return self._aside(examples, samples)
        found = self._known[key]
        for (ours, _), (given, _) in zip(found.examples, examples, strict=True):
            for place, value in zip(_tensors(ours), _tensors(given), strict=True):
                place.copy_(value, non_blocking=True)
        found.graph.replay()
        for parameter, gradient in zip(self._parameters, found.gradients, strict=True):
            parameter.grad = gradient
        return found.loss.clone()

    def _record(self, key: _Key, examples: Examples, samples: int | None) -> bool:
        own = [(tree_map(_clone, example), count) for example, count in map(_plain, examples)]
        held = [(Example(*example), count) for example, count in own]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                loss = self._compute(held, samples)
        except Exception as error:  # what cannot be recorded (a value that the host reads) can still be run
            self._fails = True
            torch.cuda.synchronize()
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            said = f"plan.compute.cuda_graphs: the step cannot be recorded ({reason}), running without"
            warnings.warn(said, stacklevel=2)
            for parameter in self._parameters:
                parameter.grad = None
            return False
        gradients = tuple(parameter.grad for parameter in self._parameters)
        self._known[key] = _Recorded(graph, held, gradients, loss)
        return True

    def _aside(self, examples: Examples, samples: int | None) -> Tensor:
        """On a stream of its own, as PyTorch asks of what comes before a recording."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._compute(examples, samples)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss


def _plain(pair: tuple[Example, int]) -> tuple[Any, int]:
    example, count = pair
    return (example.arguments, example.keywords, example.target), count


def _tensors(example: Example) -> list[Tensor]:
    leaves, _ = tree_flatten((example.arguments, example.keywords, example.target))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _shapes(examples: Examples) -> Hashable:
    return tuple(
        (count, tuple((tuple(t.shape), t.stride(), t.dtype) for t in _tensors(example))) for example, count in examples
    )


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
