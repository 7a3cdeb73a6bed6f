"""Divides the inputs of a model by position over the ranks of the context axis. The model's own code runs unmodified:
what it computes from divided inputs is divided, too (dispatch.py)."""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.context.exchange import Exchange
from meshwright.parallel.context.sequence_view import (
    SequenceView,
    balanced_tokens,
    divide_sequence,
    gather_sequence_views,
    local_part,
    sequence_spec,
)
from meshwright.parallel.differentiable_collectives import AxisGroup
from meshwright.plan import Plan
from meshwright.profile.structure.sequence import SequenceInput


def context_group(mesh: DeviceMesh, plan: Plan) -> AxisGroup:
    return AxisGroup(mesh.get_group("context"), mesh.get_local_rank("context"), plan.axes.context, "context")


class SequenceDivision:
    """Divides the inputs of a model, and the tensors that cross the cuts of a pipeline, by position."""

    def __init__(self, model: nn.Module, inputs: Sequence[SequenceInput], group: AxisGroup, exchange: Exchange) -> None:
        parameters = inspect.signature(model.forward).parameters.items()
        self._names = [name for name, parameter in parameters if parameter.kind != parameter.VAR_POSITIONAL]
        self._dims = {sequence.name: sequence.dim for sequence in inputs}
        self._group = group
        self._exchange = exchange

    def divided_inputs(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of the model's forward function, with those divided that hold sequences."""
        positional = [self._divided(name, value) for name, value in self._named(args)]
        return positional, {name: self._divided(name, value) for name, value in kwargs.items()}

    def length(self, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        """The length of the sequences among these arguments; 0 if there are none."""
        named = (*self._named(args), *kwargs.items())
        lengths = [value.shape[self._dims[name]] for name, value in named if self._is_sequence(name, value)]
        return lengths[0] if lengths else 0

    def divides(self, shape: Sequence[int], length: int) -> bool:
        """Whether a tensor that crosses a cut is divided: whether it has the dimensions (batch, length, …)."""
        return len(shape) > 1 and shape[1] == length

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of this rank's part of a tensor (batch, length, …)."""
        tokens = balanced_tokens(shape[1], self._group.size)[self._group.rank]
        return (shape[0], sum(count for _, count in tokens), *shape[2:])

    def view_of(self, local: Tensor, shape: tuple[int, ...]) -> SequenceView:
        """The tensor of this shape (batch, length, …) of which this rank has received its part."""
        return SequenceView(local, sequence_spec(shape[1], 1, self._group, self._exchange), shape)

    def local_part(self, value: Tensor) -> Tensor:
        """This rank's part of a tensor (batch, length, …)."""
        spec = sequence_spec(value.shape[1], 1, self._group, self._exchange)
        if isinstance(value, SequenceView) and value.spec == spec:
            return value.local_tensor
        return local_part(gather_sequence_views(value), spec)

    def _named(self, args: Sequence[Any]) -> list[tuple[str, Any]]:
        names = self._names
        return [(names[number] if number < len(names) else str(number), value) for number, value in enumerate(args)]

    def _is_sequence(self, name: str, value: Any) -> bool:
        return name in self._dims and isinstance(value, Tensor)

    def _divided(self, name: str, value: Any) -> Any:
        if not self._is_sequence(name, value):
            return value
        return divide_sequence(value, self._dims[name], self._group, self._exchange)


def divide_inputs(model: nn.Module, division: SequenceDivision) -> None:
    """From now on, the inputs of `model.forward` are divided by position, in place."""
    original_forward: Callable[..., Any] = model.forward

    @wraps(original_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        positional, named = division.divided_inputs(args, kwargs)
        return original_forward(*positional, **named)

    model.forward = forward
