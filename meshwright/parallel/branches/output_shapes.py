"""Tells what a branch returns for inputs of given shapes without computing it, by running it on fake tensors. A rank
that does not run the branch allocates memory for its result in this way."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.parallel.pipeline.shape_inference import copy_with_tensors
from meshwright.parallel.torch_private import VALUE_DEPENDENT_ERRORS, FakeTensorMode, TreeSpec, tree_flatten, tree_map
from meshwright.user.code import first_line

_CACHED_SIGNATURES = 64  # batches of many different lengths would otherwise fill the memory
_PLAIN_TYPES = (type(None), bool, int, float, complex, str)


@dataclass(frozen=True)
class ReturnedTensor:
    """The shape and type of one tensor that a branch returns."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class BranchOutput:
    """What a branch returns, flattened: `leaves` has a `ReturnedTensor` for each tensor and any other value itself."""

    leaves: tuple[Any, ...]
    tree: TreeSpec

    @property
    def tensors(self) -> Iterator[tuple[int, ReturnedTensor]]:
        """The tensors with their positions in `leaves`."""
        return ((position, leaf) for position, leaf in enumerate(self.leaves) if isinstance(leaf, ReturnedTensor))


class FakeBranch:
    """A copy of a branch on fake tensors, which have shapes but no memory."""

    def __init__(self, name: str, branch: nn.Module, device: torch.device) -> None:
        self.name = name
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self.module = copy_with_tensors(branch, self._fake)
        self._outputs: dict[Hashable, BranchOutput] = {}

    def output(self, inputs: Any, training: bool) -> BranchOutput:
        """Returns a description of what the branch returns for inputs (args, kwargs) of these shapes."""
        key = _signature(inputs, self._device.type), training, torch.is_grad_enabled()
        if key not in self._outputs:
            if len(self._outputs) >= _CACHED_SIGNATURES:
                self._outputs.pop(next(iter(self._outputs)))
            self._outputs[key] = self._run(inputs, training)
        return self._outputs[key]

    def _run(self, inputs: Any, training: bool) -> BranchOutput:
        self.module.train(training)
        args, kwargs = tree_map(lambda leaf: self._fake_input(leaf) if isinstance(leaf, Tensor) else leaf, inputs)
        with self._mode:
            try:
                output = self.module(*args, **kwargs)
            except VALUE_DEPENDENT_ERRORS as error:
                raise InputError(
                    f"plan.modules.branches.{self.name}: the shape of what it returns cannot be known without computing"
                    f" it, because it depends on values ({first_line(error)}): leave the branch out of the plan"
                ) from None
        leaves, tree = tree_flatten(output)
        return BranchOutput(tuple(self._described(leaf) for leaf in leaves), tree)

    def _described(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            is_dense = torch.ops.aten.is_non_overlapping_and_dense(leaf)
            stride = leaf.stride() if is_dense else torch.empty(leaf.shape, device="meta").stride()
            return ReturnedTensor(tuple(leaf.shape), tuple(stride), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, _PLAIN_TYPES):
            return leaf
        raise InputError(
            f"plan.modules.branches.{self.name}: it returns a {type(leaf).__name__}, which cannot be sent to other"
            " ranks: return tensors, or tuples, lists and dicts of them, or leave the branch out"
        )

    def _fake_input(self, tensor: Tensor) -> Tensor:
        return self._fake(tensor).requires_grad_(tensor.requires_grad)

    def _fake(self, tensor: Tensor) -> Tensor:
        with self._mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)


def _signature(inputs: Any, device_type: str) -> Hashable:
    leaves, tree = tree_flatten(inputs)
    precision = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    described = tuple(
        (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
    )
    return str(tree), described, precision
