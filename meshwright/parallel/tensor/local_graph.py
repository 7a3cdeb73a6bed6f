"""Compiles a graph of torch functions on whole tensors as it runs on one rank's shards.

The graph is run once on fake tensors of the local shapes, with shard views where tensors are sharded. A mode records
the functions that are called on local tensors, which are those that an uncompiled pass would call (dispatch.py). The
record is divided at collectives and where ranks draw different random numbers; these parts run as they are, and the
parts between them are compiled.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.split_module import split_module
from torch.overrides import TorchFunctionMode

from meshwright.errors import InputError
from meshwright.parallel.differentiable_collectives import apply_collective, result_shape
from meshwright.parallel.tensor.dispatch import METADATA, dispatch_function, function_name
from meshwright.parallel.tensor.memory.shared_memory import shares_memory, version
from meshwright.parallel.tensor.randomness import call_with_rank_seed
from meshwright.parallel.tensor.shard_view import ShardView, is_shard_view
from meshwright.parallel.torch_private import FakeTensorMode, tree_flatten, tree_map

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
_UNCOMPILED = (apply_collective, call_with_rank_seed)


class CannotRecord(Exception):
    """The graph does something on shards that a record of torch functions cannot express."""


class LocalGraph:
    """The compiled functions of one graph. It is called with the graph's inputs, local tensors or shard views, and
    returns its outputs. The first call records and compiles; later calls have inputs of the same shapes."""

    def __init__(self, graph: fx.GraphModule, compile_function: Compile) -> None:
        self._graph = graph
        self._compile = compile_function
        self._local: Callable[..., Any] | None = None
        self._outputs: list[tuple[Any, tuple[int, ...]] | None] = []  # for shard views: their spec and shape

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        if self._local is None:
            self._local = self._record(inputs)
        local_inputs = [leaf.local_tensor if isinstance(leaf, ShardView) else leaf for leaf in inputs]
        results = self._local(*local_inputs)
        return [
            result if view is None else ShardView(result, *view)
            for result, view in zip(results, self._outputs, strict=True)
        ]

    def _record(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        recorder = _Recorder()
        try:
            fake_mode = FakeTensorMode()
            fakes = [recorder.input(leaf, fake_mode) for leaf in inputs]
            # What autograd saves of fake tensors must not reach the hooks of recomputation, which count saved tensors.
            hidden = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
            with fake_mode, torch.set_grad_enabled(torch.is_grad_enabled()), hidden, recorder:
                outputs = self._graph(*fakes)
        except InputError:
            raise
        except Exception as error:
            raise CannotRecord(f"{type(error).__name__}: {error}") from error
        self._outputs = [(leaf.spec, tuple(leaf.shape)) if isinstance(leaf, ShardView) else None for leaf in outputs]
        module = recorder.finish([leaf.local_tensor if isinstance(leaf, ShardView) else leaf for leaf in outputs])
        divided = split_module(module, module, _part_numbers(module.graph).__getitem__)
        for name, part in divided.named_children():
            assert isinstance(part, fx.GraphModule)
            if not any(map(_runs_uncompiled, part.graph.nodes)):
                setattr(divided, name, _Compiled(self._compile(part)))
        return divided


class _Compiled(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any) -> Any:
        return self._function(*args)


def _runs_uncompiled(node: fx.Node) -> bool:
    return isinstance(node.target, _UncompiledCall)


def _part_numbers(graph: fx.Graph) -> dict[fx.Node, int]:
    """A number for each node: nodes that follow each other have the same, unless one of them runs uncompiled."""
    numbers: dict[fx.Node, int] = {}
    number, was_uncompiled = 0, False
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            number += _runs_uncompiled(node) or was_uncompiled
            was_uncompiled = _runs_uncompiled(node)
        numbers[node] = number
    return numbers


class _UncompiledCall:
    """A call of a function that is a node of a graph: the tensors among its arguments are given when it runs."""

    __name__ = "uncompiled_call"

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function = function
        self._args = args

    def __call__(self, *tensors: Tensor) -> Any:
        remaining = iter(tensors)
        return self._function(*(next(remaining) if isinstance(arg, Tensor) else arg for arg in self._args))


class _Recorder(TorchFunctionMode):
    """Records the torch functions that are called on local tensors, which are fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._tensors: list[Tensor] = []  # kept, because their ids are the keys of `_nodes`

    def input(self, leaf: Any, fake_mode: FakeTensorMode) -> Any:
        """Adds an input of the graph. Returns a fake tensor of its shape, or a shard view of one."""
        local = leaf.local_tensor if isinstance(leaf, ShardView) else leaf
        if not isinstance(local, Tensor):
            raise CannotRecord(f"an input is {type(local).__name__}")
        fake = fake_mode.from_tensor(local.detach()).requires_grad_(local.requires_grad)
        if local.requires_grad and not local.is_leaf:
            fake = fake.clone()  # a leaf would be taken for a parameter
        self._add(fake, self._graph.placeholder(f"input_{len(self._nodes)}"))
        return ShardView(fake, leaf.spec, tuple(leaf.shape)) if isinstance(leaf, ShardView) else fake

    def finish(self, outputs: Sequence[Tensor]) -> fx.GraphModule:
        self._graph.output(tuple(self._node(output) for output in outputs))
        self._graph.eliminate_dead_code()
        return fx.GraphModule(torch.nn.Module(), self._graph)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_flatten((args, kwargs), is_leaf=is_shard_view)[0]
        if any(isinstance(leaf, ShardView) for leaf in leaves):
            if function_name(func) in METADATA:
                return dispatch_function(func, args, kwargs)
            with self:
                return dispatch_function(func, args, kwargs)
        arguments = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        versions = [version(leaf) for leaf in arguments]
        result = self._result(func, args, kwargs)
        written = [leaf for leaf, before in zip(arguments, versions, strict=True) if version(leaf) != before]
        if any(self._is_shown_by_others(leaf) for leaf in written):
            raise CannotRecord(f"{function_name(func)} writes into memory that several tensors show")
        tensors = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        if tensors:
            self._record(func, args, kwargs, result)
        elif function_name(func) not in METADATA:
            raise CannotRecord(f"{function_name(func)} returns no tensor")
        return result

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is apply_collective:
            x = args[1]
            result = x.new_empty(result_shape(*args)).requires_grad_(x.requires_grad and torch.is_grad_enabled())
            return result.clone() if result.requires_grad else result
        if func is call_with_rank_seed:
            function, _, *arguments = args
            return function(*arguments)
        return func(*args, **kwargs)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if function_name(func) == "__set__":
            raise CannotRecord("it sets an attribute of a tensor")
        if func in _UNCOMPILED:
            func, args = _UncompiledCall(func, args), tuple(arg for arg in args if isinstance(arg, Tensor))
        node_args, node_kwargs = tree_map(
            lambda leaf: self._node(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        if getattr(func, "__name__", "") == "__get__":
            func, node_args = getattr, (node_args[0], function_name(func))
        node = self._graph.call_function(func, node_args, node_kwargs)
        if isinstance(result, Tensor):
            self._add(result, node)
            return
        for number, item in enumerate(result):
            if not isinstance(item, Tensor):
                raise CannotRecord(f"{function_name(func)} returns {type(item).__name__}")
            self._add(item, self._graph.call_function(operator.getitem, (node, number)))

    def _is_shown_by_others(self, tensor: Tensor) -> bool:
        """Whether another recorded tensor shows the memory of this one. The graph would not know that it changes."""
        return any(other is not tensor and shares_memory(tensor, [other]) for other in self._tensors)

    def _add(self, tensor: Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._tensors.append(tensor)

    def _node(self, tensor: Tensor) -> fx.Node:
        if id(tensor) not in self._nodes:
            raise CannotRecord("it uses a tensor that no torch function has returned")
        return self._nodes[id(tensor)]
