"""Whether and how a function of torch runs on parts: told by running it once on fake tensors of the whole shapes.

The operators it is made of are followed by the rules of `profile.shards`, the same that found the split. Then the
function itself runs on the ranks' local tensors; where it says sizes along the divided dimension (`view`, `split`,
slices), its operators are run instead, with the rank's own sizes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from meshwright.parallel.tensor.shard_view import ShardSpec, ShardView
from meshwright.parallel.weights.layout import stretches
from meshwright.profile.structure.dataflow import Flow, FlowRecorder, Op, Ref
from meshwright.profile.structure.split_rules import Partner, Refused, Shard, follow, join

_SHAPED = ("view", "_unsafe_view", "_reshape_alias", "expand")
_CUT = ("slice", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk")
_PLAIN = ("index", "embedding", "clone", "_to_copy", "copy_", "_unsafe_view")


@dataclass(frozen=True)
class Step:
    """One operator with the rank's own sizes. `Ref`s stand for values; `outputs` are the values it makes."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Decision:
    """`scattered` are whole arguments, by place, that are divided first; an output may be an argument (`same`)."""

    marks: tuple[ShardSpec, ...]
    shapes: tuple[tuple[int, ...], ...]
    same: tuple[int | None, ...]
    spec: TreeSpec
    scattered: dict[int, ShardSpec]
    random: bool
    steps: tuple[Step, ...] = ()
    inputs: tuple[int, ...] = ()  # the values of the tensor arguments
    outputs: tuple[int, ...] = ()


def decide(func: Any, leaves: Sequence[Any], spec: TreeSpec) -> Decision:
    """`leaves` and `spec` are (args, kwargs), flattened. Raises `Refused` where no rule covers it."""
    with _disable_current_modes(), FakeTensorMode(), torch.no_grad():
        fakes = [_fake(leaf, tuple(leaf.shape)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        recorder = FlowRecorder()
        numbers = {place: _known(recorder, fake) for place, fake in enumerate(fakes) if isinstance(fake, Tensor)}
        args, kwargs = tree_unflatten(fakes, spec)
        try:
            with recorder:
                recorder.enter("", args, kwargs)
                result = func(*args, **kwargs)
                recorder.leave(result)
        except Exception as error:
            raise Refused(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
        flow = recorder.flow
        marks = _Marks(flow, {numbers[p]: leaf.mark for p, leaf in enumerate(leaves) if isinstance(leaf, ShardView)})
        marks.free = {number for place, number in numbers.items() if not isinstance(leaves[place], ShardView)}
        for op in flow.ops:
            marks.follow(op)
        outs, out_spec = tree_flatten(result)
        decision = _decision(flow, marks, outs, out_spec, fakes, numbers)
        if _needs_own_sizes(flow, marks):
            return replace(decision, steps=_steps(flow, marks))
        _check(func, decision, fakes, leaves, spec)
    return decision


def run(decision: Decision, func: Any, leaves: list[Any], spec: TreeSpec) -> list[Any]:
    """The results, flattened, with local tensors for `leaves`."""
    if not decision.steps:
        args, kwargs = tree_unflatten(leaves, spec)
        return tree_flatten(func(*args, **kwargs))[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    held: dict[int, Any] = dict(zip(decision.inputs, tensors, strict=True))
    for step in decision.steps:
        args, kwargs = tree_map(
            lambda leaf: held[leaf.value] if isinstance(leaf, Ref) else leaf, (step.args, step.kwargs)
        )
        made = step.func(*args, **kwargs)
        results = [leaf for leaf in tree_flatten(made)[0] if isinstance(leaf, Tensor)]
        held.update(zip(step.outputs, results, strict=True))
    return [held[value] for value in decision.outputs]


class _Marks:
    """How each value of a recorded function is divided. Values in `free` are whole arguments: they can be divided."""

    def __init__(self, flow: Flow, marks: dict[int, ShardSpec]) -> None:
        self.flow = flow
        self.by_value = dict(marks)
        self.free: set[int] = set()
        self.scattered: dict[int, ShardSpec] = {}
        self.base = next(iter(marks.values()))

    @property
    def shards(self) -> dict[int, Shard]:
        return {value: mark.shard for value, mark in self.by_value.items()}

    def follow(self, op: Op) -> None:
        touched = [value for value in (*op.inputs, *op.mutated) if value in self.by_value]
        if not touched:
            return
        if any(value in self.free for value in op.mutated):
            raise Refused(f"{op.name} writes parts into a whole tensor")
        while True:
            try:
                made = self._made(op)
                break
            except Partner as partner:
                self._scatter(partner.value, op)
        source = self.by_value[touched[0]]
        for value, shard in made.items():
            parts = source.parts if shard.outer == 0 else ()
            mark = replace(source, shard=shard, parts=parts)
            self._check_even(op, mark)
            self.by_value[value] = mark
        if op.name in _CUT:
            self._check_cuts(op, source)

    def _made(self, op: Op) -> dict[int, Shard]:
        if op.name != "copy_":
            return follow(self.flow, op, self.shards)
        into, value = op.inputs[0], op.inputs[1]
        shards = self.shards
        if into not in shards:
            raise Refused("copy_ writes parts into a whole tensor")
        shift = len(self.flow.values[into].shape) - len(self.flow.values[value].shape)
        if value in shards:
            join(shards[into], replace(shards[value], dim=shards[value].dim + shift))
        elif shards[into].dim >= shift and self.flow.values[value].shape[shards[into].dim - shift] != 1:
            raise Partner(value)
        return {op.outputs[0]: shards[into]}

    def _scatter(self, value: int, op: Op) -> None:
        """A whole argument that meets parts is divided like them, dimensions counted from the last."""
        if value not in self.free or value in self.by_value:
            raise Refused(f"{op.name} joins parts and a whole tensor")
        other = next(v for v in op.inputs if v in self.by_value)
        mark, shape = self.by_value[other], self.flow.values[value].shape
        dim = mark.shard.dim + len(shape) - len(self.flow.values[other].shape)
        if dim < 0 or shape[dim] != self.flow.values[other].shape[mark.shard.dim]:
            raise Refused(f"{op.name} joins parts and a whole tensor of other sizes")
        self.by_value[value] = self.scattered[value] = replace(mark, shard=replace(mark.shard, dim=dim))

    def _check_even(self, op: Op, mark: ShardSpec) -> None:
        ranks = mark.team.ranks
        counts = {self.by_value[v].shard.count for v in (*op.inputs, *op.mutated) if v in self.by_value}
        if mark.shard.outer and mark.shard.count % ranks and mark.shard.count not in counts:
            raise Refused(f"{op.name} makes {mark.shard.count} parts, which {ranks} ranks do not divide")
        if any(count % ranks for count in counts) and len(counts | {mark.shard.count}) > 1:
            raise Refused(f"{op.name} joins parts of different sizes")

    def _check_cuts(self, op: Op, source: ShardSpec) -> None:
        """A fused output is taken apart as its parts say, or the rank holds other places than the cut asks for."""
        if source.shard.outer or not all(value in self.by_value for value in op.outputs):
            return
        edges = {0, *accumulate(source.parts)}
        for first, size in _cuts(self.flow, op):
            if size == sum(source.parts):
                continue
            if (first, first + size) not in zip(sorted(edges), sorted(edges)[1:], strict=False):
                raise Refused(f"{op.name} cuts a fused output elsewhere than between its parts {source.parts}")


def _cuts(flow: Flow, op: Op) -> list[tuple[int, int]]:
    """Where the pieces of a cut begin and how long they are."""
    dim = _dim(flow, op)
    sizes = [flow.values[value].shape[dim] for value in op.outputs]
    if op.name == "slice":
        start = (op.args[2] if len(op.args) > 2 else None) or 0
        size = flow.values[op.inputs[0]].shape[dim]
        return [(min(start + size if start < 0 else start, size), sizes[0])]
    return list(zip(accumulate(sizes, initial=0), sizes, strict=False))


def _dim(flow: Flow, op: Op) -> int:
    place = 1 if op.name == "slice" else 2
    dim = op.args[place] if len(op.args) > place else op.kwargs.get("dim", 0)
    return int(dim) % len(flow.values[op.inputs[0]].shape)


def _decision(
    flow: Flow, marks: _Marks, outs: list[Any], spec: TreeSpec, fakes: list[Any], numbers: dict[int, int]
) -> Decision:
    if any(not isinstance(out, Tensor) and out is not None for out in outs):
        raise Refused("it asks for the values of a divided tensor")
    tensors = [out for out in outs if isinstance(out, Tensor)]
    values = flow.calls[0].outputs
    missing = [value for value in values if value not in marks.by_value]
    if missing:
        raise Refused("it needs the whole dimension")
    same = tuple(next((place for place, fake in enumerate(fakes) if fake is out), None) for out in tensors)
    places = {number: place for place, number in numbers.items()}
    return Decision(
        marks=tuple(marks.by_value[value] for value in values),
        shapes=tuple(tuple(out.shape) for out in tensors),
        same=same,
        spec=spec,
        scattered={places[value]: mark for value, mark in marks.scattered.items()},
        random=any(torch.Tag.nondeterministic_seeded in op.func.tags for op in flow.ops),
        inputs=tuple(numbers.values()),
        outputs=values,
    )


def _needs_own_sizes(flow: Flow, marks: _Marks) -> bool:
    """Whether the function says sizes; one that computes too finds them in its arguments."""
    touched = [op for op in flow.ops if any(value in marks.by_value for value in op.inputs)]
    if not any(op.name in (*_SHAPED, *_CUT) for op in touched):
        return False
    if all(op.func.is_view or op.name in _PLAIN for op in flow.ops):
        return True
    if any(op.name in _CUT and _dim(flow, op) == marks.by_value[op.inputs[0]].shard.dim for op in touched):
        raise Refused("it takes the divided dimension apart and computes with the pieces")
    return False


def _steps(flow: Flow, marks: _Marks) -> tuple[Step, ...]:
    return tuple(_step(flow, op, marks) for op in flow.ops)


def _step(flow: Flow, op: Op, marks: _Marks) -> Step:
    mark = marks.by_value.get(op.inputs[0]) if op.inputs else None
    own = [marks.by_value[v].local_shape(flow.values[v].shape) for v in op.outputs if v in marks.by_value]
    if mark is not None and op.name in _SHAPED and not isinstance(op.args[1], torch.dtype):
        # Of the local memory no more is known than its shape: a view where there can be one.
        shaped = torch.Tensor.expand if op.name == "expand" else torch.reshape
        return Step(shaped, (op.args[0], own[0]), {}, op.outputs)
    if mark is not None and op.name in _CUT and _dim(flow, op) == mark.shard.dim:
        dim = mark.shard.dim
        if op.name != "slice":
            return Step(torch.split, (op.args[0], [shape[dim] for shape in own], dim), {}, op.outputs)
        first = _own_place(mark, _cuts(flow, op)[0][0])
        return Step(torch.narrow, (op.args[0], dim, first, own[0][dim]), {}, op.outputs)
    return Step(op.func, op.args, op.kwargs, op.outputs)


def _own_place(mark: ShardSpec, place: int) -> int:
    """Where, among what the rank holds, the whole dimension's `place` lies, which begins a part."""
    shard, team = mark.shard, mark.team
    units, inner = (mark.parts, 1) if shard.outer == 0 else ((shard.count,) * shard.outer, shard.inner)
    held = [length * inner for _, length in stretches(units, team.ranks, team.rank)]
    edges = list(accumulate((unit * inner for unit in units), initial=0))
    return sum(held[: edges.index(place)])


def _check(func: Any, decision: Decision, fakes: list[Any], leaves: Sequence[Any], spec: TreeSpec) -> None:
    """The function on local shapes makes the local shapes that the rules say."""
    local = list(fakes)
    for place, leaf in enumerate(leaves):
        mark = leaf.mark if isinstance(leaf, ShardView) else decision.scattered.get(place)
        if isinstance(leaf, Tensor):
            local[place] = _fake(leaf, mark.local_shape(tuple(leaf.shape)) if mark else tuple(leaf.shape))
    args, kwargs = tree_unflatten(local, spec)
    try:
        outs = [out for out in tree_flatten(func(*args, **kwargs))[0] if isinstance(out, Tensor)]
    except Exception as error:
        raise Refused(f"on parts, {str(error).splitlines()[0] if str(error) else type(error).__name__}") from error
    for out, mark, shape in zip(outs, decision.marks, decision.shapes, strict=True):
        if tuple(out.shape) != mark.local_shape(shape):
            raise Refused("it says sizes that only the whole tensor has")


def _fake(leaf: Tensor, shape: tuple[int, ...]) -> Tensor:
    device = leaf.device if leaf.device.type != "meta" else torch.device("cpu")
    return torch.empty(shape, dtype=leaf.dtype, device=device)


def _known(recorder: FlowRecorder, fake: Tensor) -> int:
    recorder.know(fake, "input", "")
    return recorder.values_in(fake)[0]
