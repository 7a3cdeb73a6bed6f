"""Compiles blocks whose layers are split over the tensor axis.

The compiler traces the block's own code with whole tensors: stand-ins of the whole shapes, which need no memory, take
the place of this rank's shards. It gives the traced graph to `_ShardedBackend`, which compiles what the graph does with
the shards (local_graph.py). So the compiler's guards also hold here: a block whose Python state or input shapes change
is traced again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from meshwright.parallel.tensor.local_graph import Compile, LocalGraph
from meshwright.parallel.tensor.parameter_swap import ParameterSwap, swapped_forwards
from meshwright.parallel.tensor.shard_view import ShardView, is_shard_view
from meshwright.parallel.torch_private import tree_flatten, tree_unflatten


def has_split_layers(block: nn.Module) -> bool:
    return bool(swapped_forwards(block))


def reason_not_to_compile(block: nn.Module) -> str | None:
    """Returns why a block with split layers cannot be compiled, or None if it can."""
    forwards = swapped_forwards(block)
    if any(forward.gathered_kinds for forward in forwards):
        return "blocks that gather what they have split are not compiled"
    return None


class SplitBlocks:
    """Makes compiled `forward` functions for blocks with split layers. Equal blocks share their compiled code."""

    def __init__(self, compile_function: Compile) -> None:
        self._backend = _ShardedBackend(compile_function)

    def function(self, block: nn.Module) -> Callable[..., Any]:
        """Returns a function that runs the block's forward pass, and compiles it when it is first called."""
        swaps = {(id(s.owner), s.name): s for forward in swapped_forwards(block) for s in forward.swaps}
        traced = torch.compile(block.forward, backend=self._backend, fullgraph=True, dynamic=False)
        return _SplitBlock(traced, list(swaps.values()), self._backend)


class _SplitBlock:
    def __init__(self, traced: Callable[..., Any], swaps: Sequence[ParameterSwap], backend: "_ShardedBackend") -> None:
        self._traced = traced
        self._swaps = swaps
        self._backend = backend
        self._stand_ins: dict[Any, Tensor] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs), is_leaf=is_shard_view)
        views: dict[int, ShardView] = {}
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, ShardView):
                leaves[position] = self._stand_in(position, leaf, tuple(leaf.shape))
                views[id(leaves[position])] = leaf
        args, kwargs = tree_unflatten(leaves, tree)
        with self._replaced(views), self._backend.running(views):
            return self._traced(*args, **kwargs)

    @contextmanager
    def _replaced(self, views: dict[int, ShardView]) -> Iterator[None]:
        """Replaces split parameters by stand-ins, and adds the shard views for which they stand to `views`."""
        replaced: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for swap in self._swaps:
                parameters: dict[str, Any] = swap.owner._parameters
                parameter = parameters[swap.name]
                replaced.append((parameters, swap.name, parameter))
                view = parameter
                if not isinstance(parameter, ShardView):  # an enclosing module may have replaced it already
                    view = ShardView(parameter, swap.spec, swap.full_shape)
                stand_in = self._stand_in((id(swap.owner), swap.name), view, swap.full_shape)
                parameters[swap.name] = stand_in
                views[id(stand_in)] = view
            yield
        finally:
            for parameters, name, parameter in replaced:
                parameters[name] = parameter

    def _stand_in(self, key: Any, view: ShardView, shape: tuple[int, ...]) -> Tensor:
        """A tensor of this shape that needs no memory; the same one for every call."""
        local = view.local_tensor
        full_key = (key, shape, local.dtype, local.device, local.requires_grad)
        if full_key not in self._stand_ins:
            self._stand_ins[full_key] = local.detach().new_zeros(()).expand(shape).requires_grad_(local.requires_grad)
        return self._stand_ins[full_key]


class _ShardedBackend:
    """The backend of `torch.compile` for blocks with split layers."""

    def __init__(self, compile_function: Compile) -> None:
        self._compile = compile_function
        self._views: dict[int, ShardView] = {}

    @contextmanager
    def running(self, views: dict[int, ShardView]) -> Iterator[None]:
        """A context in which compiled functions are given these shard views, by the ids of their stand-ins."""
        self._views = views
        try:
            yield
        finally:
            self._views = {}

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        local_graph = LocalGraph(graph, self._compile)

        def run(*inputs: Any) -> list[Any]:
            return local_graph([self._views.get(id(leaf), leaf) for leaf in inputs])

        return run
