"""Derives how a torch function runs on the ranks' local tensors, by running it once on fake tensors of the full shapes.

The operators that the function calls are recorded, and the split rules of `profile/structure/split_rules.py`, the same
ones that decided which layers can be split, tell how each of their results is sharded. After that the function itself
runs on the local tensors. Where its arguments contain sizes of the sharded dimension (`view`, `split`, slices), the
recorded operators run instead, with the sizes replaced by this rank's.

dispatch.py calls `derive_local_call` once for each function and combination of shapes, and `run_local_call` each time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.tensor.shard_view import ShardSpec, ShardView, is_shard_view
from meshwright.parallel.torch_private import (
    FakeTensorMode,
    TreeSpec,
    disable_dispatch_modes,
    storage_id,
    tree_flatten,
    tree_map,
    tree_unflatten,
)
from meshwright.profile.structure.dataflow import Dataflow, DataflowRecorder, TracedOperator, ValueRef
from meshwright.profile.structure.split_rules import (
    CannotSplit,
    DividedDimension,
    NeedsDividedInput,
    merge_divided,
    propagate_split,
)

# Names of aten operators: those with a shape as argument, those that slice, and those besides views that only copy.
_TAKES_SHAPE = ("view", "_unsafe_view", "_reshape_alias", "expand")
_SLICES = ("slice", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk")
_COPIES = ("index", "embedding", "clone", "_to_copy", "copy_", "_unsafe_view")


@dataclass(frozen=True)
class LocalOperator:
    """One recorded operator with this rank's sizes in its arguments. A `ValueRef` stands in the place of each tensor;
    `outputs` are the numbers of the values that it returns."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class LocalCall:
    """How one torch function runs on local tensors.

    `sliced_arguments` are the replicated arguments, by position, of which each rank first takes its shard. An entry of
    `returned_arguments` is the position of the argument that the function returns itself (in-place functions), or None
    where the output is a new tensor. `may_share_memory`: whether the output shows the memory of an argument if all
    arguments are contiguous. Without `operators` the function itself is called.
    """

    output_specs: tuple[ShardSpec, ...]
    output_shapes: tuple[tuple[int, ...], ...]
    returned_arguments: tuple[int | None, ...]
    output_tree: TreeSpec
    sliced_arguments: dict[int, ShardSpec]
    draws_random_numbers: bool
    may_share_memory: tuple[bool, ...]
    operators: tuple[LocalOperator, ...] = ()
    input_values: tuple[int, ...] = ()  # the numbers of the tensor arguments in the recording
    output_values: tuple[int, ...] = ()


def derive_local_call(func: Any, leaves: Sequence[Any], tree: TreeSpec) -> LocalCall:
    """Returns how the function runs on local tensors. `leaves` and `tree` are its (args, kwargs), flattened. Raises
    `CannotSplit` if no rule covers the function."""
    with disable_dispatch_modes(), FakeTensorMode(), torch.no_grad():
        fakes = [_fake(leaf, tuple(leaf.shape)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        recorder = DataflowRecorder()
        values = {
            position: _register(recorder, fake) for position, fake in enumerate(fakes) if isinstance(fake, Tensor)
        }
        args, kwargs = tree_unflatten(fakes, tree)
        try:
            with recorder:
                recorder.enter("", args, kwargs)
                result = func(*args, **kwargs)
                recorder.leave(result)
        except Exception as error:
            raise CannotSplit(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
        flow = recorder.flow
        sharding = _ShardedValues(
            flow,
            {values[position]: leaf.spec for position, leaf in enumerate(leaves) if isinstance(leaf, ShardView)},
            {value for position, value in values.items() if not isinstance(leaves[position], ShardView)},
        )
        for operator in flow.operators:
            sharding.propagate(operator)
        outputs, output_tree = tree_flatten(result)
        local_call = _local_call(flow, sharding, outputs, output_tree, fakes, values)
        if _has_sizes_in_arguments(flow, sharding):
            operators = tuple(_local_operator(flow, operator, sharding) for operator in flow.operators)
            return replace(local_call, operators=operators)
        _check_local_shapes(func, local_call, fakes, leaves, tree)
    return local_call


def run_local_call(local_call: LocalCall, func: Any, leaves: list[Any], tree: TreeSpec) -> list[Any]:
    """Runs the function on local tensors and returns its results, flattened. `leaves` and `tree` are its (args, kwargs)
    with local tensors, flattened."""
    if not local_call.operators:
        args, kwargs = tree_unflatten(leaves, tree)
        return tree_flatten(func(*args, **kwargs), is_leaf=is_shard_view)[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    values: dict[int, Any] = dict(zip(local_call.input_values, tensors, strict=True))
    for operator in local_call.operators:
        args, kwargs = tree_map(
            lambda leaf: values[leaf.value] if isinstance(leaf, ValueRef) else leaf, (operator.args, operator.kwargs)
        )
        returned = operator.func(*args, **kwargs)
        results = [leaf for leaf in tree_flatten(returned, is_leaf=is_shard_view)[0] if isinstance(leaf, Tensor)]
        values.update(zip(operator.outputs, results, strict=True))
    return [values[value] for value in local_call.output_values]


class _ShardedValues:
    """How each value of a recorded function is sharded. Values in `replicated_arguments` can still be sliced."""

    def __init__(self, flow: Dataflow, specs: dict[int, ShardSpec], replicated_arguments: set[int]) -> None:
        self.flow = flow
        self.specs = dict(specs)
        self.replicated_arguments = replicated_arguments
        self.sliced: dict[int, ShardSpec] = {}

    @property
    def shards(self) -> dict[int, DividedDimension]:
        return {value: spec.shard for value, spec in self.specs.items()}

    def propagate(self, operator: TracedOperator) -> None:
        """Adds the specs of the operator's outputs, if any of its inputs is sharded."""
        sharded = [value for value in (*operator.inputs, *operator.overwritten) if value in self.specs]
        if not sharded:
            return
        if any(value in self.replicated_arguments for value in operator.overwritten):
            raise CannotSplit(f"{operator.name} writes a shard into a full tensor")
        while True:
            try:
                output_shards = self._output_shards(operator)
                break
            except NeedsDividedInput as needed:
                self._slice_argument(needed.value, operator)
        source = self.specs[sharded[0]]
        for value, shard in output_shards.items():
            spec = replace(source, shard=shard, fused_sizes=source.fused_sizes if shard.outer == 0 else ())
            if not spec.accepts(shard):
                raise CannotSplit(f"{operator.name} divides other parts")
            self._check_even(operator, spec)
            self.specs[value] = spec
        if operator.name in _SLICES:
            self._check_slices(operator, source)

    def _output_shards(self, operator: TracedOperator) -> dict[int, DividedDimension]:
        if operator.name != "copy_":
            return propagate_split(self.flow, operator, self.shards)
        target, source = operator.inputs[0], operator.inputs[1]
        shards = self.shards
        if target not in shards:
            raise CannotSplit("copy_ writes a shard into a full tensor")
        shift = len(self.flow.values[target].shape) - len(self.flow.values[source].shape)
        if source in shards:
            merge_divided(shards[target], replace(shards[source], dim=shards[source].dim + shift))
        elif shards[target].dim >= shift and self.flow.values[source].shape[shards[target].dim - shift] != 1:
            raise NeedsDividedInput(source)
        return {operator.outputs[0]: shards[target]}

    def _slice_argument(self, value: int, operator: TracedOperator) -> None:
        """A replicated argument that meets a shard is sliced in the same way, dimensions counted from the last one, as
        torch broadcasts them."""
        if value not in self.replicated_arguments or value in self.specs:
            raise CannotSplit(f"{operator.name} combines a shard with a full tensor")
        partner = next(v for v in operator.inputs if v in self.specs)
        spec, shape = self.specs[partner], self.flow.values[value].shape
        dim = spec.shard.dim + len(shape) - len(self.flow.values[partner].shape)
        if dim < 0 or shape[dim] != self.flow.values[partner].shape[spec.shard.dim]:
            raise CannotSplit(f"{operator.name} combines a shard with a full tensor of other sizes")
        self.specs[value] = self.sliced[value] = replace(spec, shard=replace(spec.shard, dim=dim))

    def _check_even(self, operator: TracedOperator, output: ShardSpec) -> None:
        if output.kind == "context":  # `accepts` has checked it
            return
        ranks, count = output.group.size, output.shard.count
        input_counts = {
            self.specs[value].shard.count for value in (*operator.inputs, *operator.overwritten) if value in self.specs
        }
        if output.shard.outer and count % ranks and count not in input_counts:
            raise CannotSplit(f"{operator.name} makes {count} parts, which {ranks} ranks do not divide")
        if any(input_count % ranks for input_count in input_counts) and len(input_counts | {count}) > 1:
            raise CannotSplit(f"{operator.name} combines shards of different sizes")

    def _check_slices(self, operator: TracedOperator, source: ShardSpec) -> None:
        """A fused output must be sliced between its fused sizes: the rank holds a shard of each of these."""
        if source.shard.outer or not all(value in self.specs for value in operator.outputs):
            return
        edges = sorted({0, *accumulate(source.fused_sizes)})
        for first, size in _slice_ranges(self.flow, operator):
            if size == sum(source.fused_sizes):
                continue
            if (first, first + size) not in pairwise(edges):
                raise CannotSplit(
                    f"{operator.name} slices a fused output elsewhere than between its parts {source.fused_sizes}"
                )


def _slice_ranges(flow: Dataflow, operator: TracedOperator) -> list[tuple[int, int]]:
    """The first index and the length of each slice that the operator returns."""
    dim = _sliced_dim(flow, operator)
    sizes = [flow.values[value].shape[dim] for value in operator.outputs]
    if operator.name == "slice":
        start = (operator.args[2] if len(operator.args) > 2 else None) or 0
        size = flow.values[operator.inputs[0]].shape[dim]
        return [(min(start + size if start < 0 else start, size), sizes[0])]
    return list(zip(accumulate(sizes, initial=0), sizes, strict=False))


def _sliced_dim(flow: Dataflow, operator: TracedOperator) -> int:
    position = 1 if operator.name == "slice" else 2
    dim = operator.args[position] if len(operator.args) > position else operator.kwargs.get("dim", 0)
    return int(dim) % len(flow.values[operator.inputs[0]].shape)


def _local_call(
    flow: Dataflow,
    sharding: _ShardedValues,
    outputs: list[Any],
    output_tree: TreeSpec,
    fakes: list[Any],
    values: dict[int, int],
) -> LocalCall:
    if any(not isinstance(output, Tensor) and output is not None for output in outputs):
        raise CannotSplit("it reads values of a sharded tensor")
    tensors = [output for output in outputs if isinstance(output, Tensor)]
    output_values = flow.calls[0].outputs
    if any(value not in sharding.specs for value in output_values):
        raise CannotSplit("it needs the full dimension")
    positions = {value: position for position, value in values.items()}
    return LocalCall(
        output_specs=tuple(sharding.specs[value] for value in output_values),
        output_shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        returned_arguments=tuple(
            next((position for position, fake in enumerate(fakes) if fake is tensor), None) for tensor in tensors
        ),
        output_tree=output_tree,
        sliced_arguments={positions[value]: spec for value, spec in sharding.sliced.items()},
        may_share_memory=tuple(any(storage_id(tensor) == storage_id(fakes[p]) for p in values) for tensor in tensors),
        draws_random_numbers=any(torch.Tag.nondeterministic_seeded in op.func.tags for op in flow.operators),
        input_values=tuple(values.values()),
        output_values=output_values,
    )


def _has_sizes_in_arguments(flow: Dataflow, sharding: _ShardedValues) -> bool:
    """Whether the function only views or copies, and its arguments hold sizes of the full tensor. A function that also
    computes takes the sizes from the tensors that it is given."""
    affected = [op for op in flow.operators if any(value in sharding.specs for value in op.inputs)]
    if not any(op.name in (*_TAKES_SHAPE, *_SLICES) for op in affected):
        return False
    if all(op.func.is_view or op.name in _COPIES for op in flow.operators):
        return True
    if any(op.name in _SLICES and _sliced_dim(flow, op) == sharding.specs[op.inputs[0]].shard.dim for op in affected):
        raise CannotSplit("it slices the sharded dimension and computes with the slices")
    return False


def _local_operator(flow: Dataflow, operator: TracedOperator, sharding: _ShardedValues) -> LocalOperator:
    spec = sharding.specs.get(operator.inputs[0]) if operator.inputs else None
    local_shapes = [
        sharding.specs[value].local_shape(flow.values[value].shape)
        for value in operator.outputs
        if value in sharding.specs
    ]
    if spec is not None and operator.name in _TAKES_SHAPE and not isinstance(operator.args[1], torch.dtype):
        # The strides of the local tensor are not known here: reshape returns a view where there can be one.
        func = torch.Tensor.expand if operator.name == "expand" else torch.reshape
        return LocalOperator(func, (operator.args[0], local_shapes[0]), {}, operator.outputs)
    if spec is not None and operator.name in _SLICES and _sliced_dim(flow, operator) == spec.shard.dim:
        dim = spec.shard.dim
        if operator.name != "slice":
            sizes = [shape[dim] for shape in local_shapes]
            return LocalOperator(torch.split, (operator.args[0], sizes, dim), {}, operator.outputs)
        first = _local_index(spec, _slice_ranges(flow, operator)[0][0])
        return LocalOperator(torch.narrow, (operator.args[0], dim, first, local_shapes[0][dim]), {}, operator.outputs)
    return LocalOperator(operator.func, operator.args, operator.kwargs, operator.outputs)


def _local_index(spec: ShardSpec, index: int) -> int:
    """The index in this rank's shard of the full dimension's `index`, at which one of the fused slices begins."""
    return sum(length for first, length in spec.ranges.by_rank[spec.group.rank] if first < index)


def _check_local_shapes(
    func: Any, local_call: LocalCall, fakes: list[Any], leaves: Sequence[Any], tree: TreeSpec
) -> None:
    """Checks that the function, run on local shapes, returns the local shapes that the rules expect."""
    local_fakes = list(fakes)
    for position, leaf in enumerate(leaves):
        spec = leaf.spec if isinstance(leaf, ShardView) else local_call.sliced_arguments.get(position)
        if isinstance(leaf, Tensor):
            local_fakes[position] = _fake(leaf, spec.local_shape(tuple(leaf.shape)) if spec else tuple(leaf.shape))
    args, kwargs = tree_unflatten(local_fakes, tree)
    try:
        outputs = [output for output in tree_flatten(func(*args, **kwargs))[0] if isinstance(output, Tensor)]
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CannotSplit(f"on a shard, {reason}") from error
    for output, spec, shape in zip(outputs, local_call.output_specs, local_call.output_shapes, strict=True):
        if tuple(output.shape) != spec.local_shape(shape):
            raise CannotSplit("it is given sizes that only the full tensor has")


def _fake(leaf: Tensor, shape: tuple[int, ...]) -> Tensor:
    device = leaf.device if leaf.device.type != "meta" else torch.device("cpu")
    return torch.empty(shape, dtype=leaf.dtype, device=device)


def _register(recorder: DataflowRecorder, fake: Tensor) -> int:
    """The number that the recorder gives to an argument."""
    recorder.register(fake, "input", "")
    return recorder.values_in(fake)[0]
