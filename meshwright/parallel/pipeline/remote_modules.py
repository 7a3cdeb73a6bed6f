"""Modules that stand in a stage for the pieces of other stages, and the hooks that receive and send tensors.

Every stage runs the model's own forward pass from beginning to end. Where it calls a piece of another stage, a
`RemoteModule` returns the tensors that this stage received in place of the piece's outputs, or fake tensors of the
shapes that the piece would have returned. Operators on fake tensors give fake tensors, which cost nothing and are
dropped at the end.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.parallel.context.sequence_view import is_sequence_view
from meshwright.parallel.pipeline.stage_dataflow import CallKey, TensorPosition
from meshwright.parallel.tensor.shard_view import gather_shard_views
from meshwright.parallel.torch_private import FakeTensor, tree_flatten, tree_leaves, tree_map, tree_unflatten


class RemoteTensorError(MeshwrightError):
    """Compiled code uses a tensor of another stage. The same stage, uncompiled, does not."""


@dataclass(frozen=True)
class StageTransfers:
    """What one stage receives and sends, by call and by the tensor's index in the call's inputs or outputs.

    Received tensors replace outputs (`received_outputs`) or inputs (`received_inputs`) of calls; tensors to send are
    collected from outputs (`sent_outputs`) or inputs (`sent_inputs`). All four map tensor indices to value ids.
    `passed_through` maps the index of an output to that of the input which the call returns as it is. `local_calls`
    are the calls that this stage computes.
    """

    local_calls: frozenset[CallKey]
    received_outputs: Mapping[CallKey, Mapping[int, int]]
    received_inputs: Mapping[CallKey, Mapping[int, int]]
    sent_outputs: Mapping[CallKey, Mapping[int, int]]
    sent_inputs: Mapping[CallKey, Mapping[int, int]]
    passed_through: Mapping[CallKey, Mapping[int, int]]


def positions_by_call(positions: Iterator[tuple[TensorPosition, int]]) -> dict[CallKey, dict[int, int]]:
    """From pairs of a position and a value id: for each call, the value id at each tensor index."""
    by_call: dict[CallKey, dict[int, int]] = {}
    for position, value_id in positions:
        by_call.setdefault(position.call, {})[position.tensor_index] = value_id
    return by_call


@dataclass
class StageForward:
    """State of one forward pass of a stage. `values` holds the received tensors by value id, and collects those to
    send. `fake_outputs` is what each call returns for inputs of these shapes, as fake tensors."""

    transfers: StageTransfers
    fake_outputs: Mapping[CallKey, Any]
    values: dict[int, Tensor]
    call_counts: dict[str, int] = field(default_factory=dict)

    def start_call(self, name: str) -> CallKey:
        self.call_counts[name] = self.call_counts.get(name, 0) + 1
        return self.current_call(name)

    def current_call(self, name: str) -> CallKey:
        return name, self.call_counts[name] - 1

    def collect_sent(self, value_ids: Mapping[int, int], tree: Any) -> None:
        """Keeps the real tensors at these indices of `tree` for sending."""
        if value_ids:
            tensors = tensors_in(tree)
            for tensor_index, value_id in value_ids.items():
                if value_id not in self.values and not isinstance(tensors[tensor_index], FakeTensor):
                    self.values[value_id] = gather_shard_views(tensors[tensor_index])

    def insert_received(self, value_ids: Mapping[int, int], tree: Any) -> Any:
        """Returns `tree` with the received tensors at these indices."""
        return replace_tensors(tree, {index: self.values[value_id] for index, value_id in value_ids.items()})


def replace_tensors(tree: Any, new_tensors: Mapping[int, Tensor]) -> Any:
    """Returns `tree` with new tensors, by index among all tensors in it."""
    if not new_tensors:
        return tree
    leaves, structure = tree_flatten(tree, is_leaf=is_sequence_view)
    leaf_of_tensor = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for tensor_index, tensor in new_tensors.items():
        leaves[leaf_of_tensor[tensor_index]] = tensor
    return tree_unflatten(leaves, structure)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree, is_leaf=is_sequence_view) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class RemoteTensor:
    """Stands for a fake tensor in code that is compiled, which cannot contain fake tensors."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def without_fake_tensors(tree: Any) -> Any:
    """Returns `tree` with a `RemoteTensor` in the place of each fake tensor."""

    def described(leaf: Any) -> Any:
        if not isinstance(leaf, FakeTensor):
            return leaf
        return RemoteTensor(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device)

    return tree_map(described, tree)


def with_remote_tensors(tree: Any) -> Any:
    """Returns `tree` with a tensor in the place of each `RemoteTensor`. The compiler removes it and all operators on
    it, because nothing uses their results; if something does, computing the tensor raises a `RemoteTensorError`."""

    def tensor_of(leaf: Any) -> Any:
        if not isinstance(leaf, RemoteTensor):
            return leaf
        return _remote_tensor(list(leaf.shape), list(leaf.stride), leaf.dtype, leaf.device)

    return tree_map(tensor_of, tree)


@torch.library.custom_op("meshwright::remote_tensor", mutates_args=())
def _remote_tensor(shape: list[int], stride: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    raise RemoteTensorError("compiled code of a pipeline stage needs a tensor that another stage computes")


@_remote_tensor.register_fake
def _(shape: list[int], stride: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


class ActiveForward:
    """Holds, in `current`, the stage's forward pass that is running on this rank, and None at other times. It is None
    also while a backward pass recomputes a block; recomputed modules therefore neither receive nor send."""

    def __init__(self) -> None:
        self.current: StageForward | None = None

    @contextmanager
    def running(self, stage_forward: StageForward) -> Iterator[None]:
        self.current = stage_forward
        try:
            yield
        finally:
            self.current = None

    def add_hooks(self, name: str, piece: nn.Module) -> None:
        """Makes a piece that runs on this rank receive and send. Call it when all other hooks are registered, so that
        the sent tensors are those that the rest of the forward pass sees."""

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            forward = self.current
            if forward is None:
                return None
            transfers, call = forward.transfers, forward.start_call(name)
            args, kwargs = forward.insert_received(transfers.received_inputs.get(call, {}), (args, kwargs))
            if call in transfers.local_calls and any(
                isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))
            ):
                raise MeshwrightError(
                    f"{name} needs a tensor that an earlier pipeline stage computes and that is not sent to this one:"
                    " put the cut somewhere else"
                )
            forward.collect_sent(transfers.sent_inputs.get(call, {}), (args, kwargs))
            return args, kwargs

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            forward = self.current
            if forward is None:
                return None
            transfers, call = forward.transfers, forward.current_call(name)
            if call in transfers.sent_outputs:
                # The tensor axis may divide the output among ranks, and ranks behind the cut need all of it.
                output = gather_shard_views(output)
                forward.collect_sent(transfers.sent_outputs[call], output)
            return forward.insert_received(transfers.received_outputs.get(call, {}), output)

        piece.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        piece.register_forward_hook(after)


class RemoteModule(nn.Module):
    """Stands in a stage for a piece that runs in another stage. Its only parameters are those that the forward pass
    between the pieces uses in this stage. All other attributes are read from `original`: the piece itself if another
    stage of this rank runs it, otherwise a copy of the piece without memory (meta or fake tensors)."""

    def __init__(self, name: str, active_forward: ActiveForward, original: nn.Module) -> None:
        super().__init__()
        self.module_name = name
        self.training = original.training
        # Set without nn.Module's registration: neither is a part of this stage.
        object.__setattr__(self, "_active_forward", active_forward)
        object.__setattr__(self, "_original", original)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        active_forward: ActiveForward = self.__dict__["_active_forward"]
        forward = active_forward.current
        if forward is None:
            raise MeshwrightError(f"{self.module_name} runs in another pipeline stage")
        transfers, call = forward.transfers, forward.start_call(self.module_name)
        forward.collect_sent(transfers.sent_inputs.get(call, {}), (args, kwargs))
        if call not in forward.fake_outputs:
            raise MeshwrightError(
                f"{self.module_name} runs more often than for the sample batch that the model was cut into stages with:"
                " use a sample batch for which it runs as often as in training, or put the cut somewhere else"
            )
        passed_through = transfers.passed_through.get(call, {})
        inputs = tensors_in((args, kwargs)) if passed_through else []
        output = replace_tensors(
            with_remote_tensors(forward.fake_outputs[call]),
            {output_index: inputs[input_index] for output_index, input_index in passed_through.items()},
        )
        return forward.insert_received(transfers.received_outputs.get(call, {}), output)

    def add_parameter(self, path: str, parameter: nn.Parameter) -> None:
        """Holds a parameter of the original, under the name that it has there."""
        owner, _, name = path.rpartition(".")
        self._submodule(owner)._parameters[name] = parameter

    def share_parameters(self, owner: str, original: nn.Module) -> None:
        """Uses the parameter table of a submodule of the original that lies on this rank, so that parameters which
        are replaced there are replaced here too."""
        self._submodule(owner)._parameters = original._parameters

    def _submodule(self, path: str) -> "RemoteModule":
        if not path:
            return self
        child, _, rest = path.partition(".")
        if child not in self._modules:
            original = getattr(self.original, child)
            self._modules[child] = RemoteModule(
                f"{self.module_name}.{child}", self.__dict__["_active_forward"], original
            )
        submodule = self._modules[child]
        assert isinstance(submodule, RemoteModule)
        return submodule._submodule(rest)

    @property
    def original(self) -> Any:
        return self.__dict__["_original"]

    def set_original(self, original: nn.Module) -> None:
        object.__setattr__(self, "_original", original)
        for name, child in self._modules.items():
            assert isinstance(child, RemoteModule)
            child.set_original(getattr(original, name))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "_original" not in self.__dict__:
                raise
            return getattr(self.__dict__["_original"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RemoteModule":
        return self

    def extra_repr(self) -> str:
        return self.module_name
