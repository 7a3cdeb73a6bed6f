"""What a branch returns for inputs of given shapes, known before it is there: found on tensors without memory."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map

from meshwright.errors import InputError
from meshwright.parallel.pipeline.shape_inference import without_memory

_KEPT = 64  # signatures: batches of many lengths would fill the memory
_PLAIN = (type(None), bool, int, float, complex, str)


@dataclass(frozen=True)
class Note:
    """One tensor that a branch returns."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Notes:
    """A branch's result: `leaves` are a `Note` for each tensor, and whatever else it holds."""

    leaves: tuple[Any, ...]
    form: TreeSpec

    @property
    def tensors(self) -> Iterator[tuple[int, Note]]:
        return ((place, leaf) for place, leaf in enumerate(self.leaves) if isinstance(leaf, Note))


class Outline:
    """A branch without memory: run on inputs without memory, it tells what the real one will return."""

    def __init__(self, name: str, branch: nn.Module, device: torch.device) -> None:
        self.name = name
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self.twin = without_memory(branch, self._fake)
        self._found: dict[Hashable, Notes] = {}

    def notes(self, given: Any, training: bool) -> Notes:
        key = _signature(given, self._device.type), training, torch.is_grad_enabled()
        if key not in self._found:
            if len(self._found) >= _KEPT:
                self._found.pop(next(iter(self._found)))
            self._found[key] = self._run(given, training)
        return self._found[key]

    def _run(self, given: Any, training: bool) -> Notes:
        self.twin.train(training)
        args, kwargs = tree_map(lambda leaf: self._fake_input(leaf) if isinstance(leaf, Tensor) else leaf, given)
        with self._mode:
            output = self.twin(*args, **kwargs)
        leaves, form = tree_flatten(output)
        return Notes(tuple(self._note(leaf) for leaf in leaves), form)

    def _note(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            dense = torch.ops.aten.is_non_overlapping_and_dense(leaf)
            stride = leaf.stride() if dense else torch.empty(leaf.shape, device="meta").stride()
            return Note(tuple(leaf.shape), tuple(stride), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, _PLAIN):
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


def _signature(given: Any, device_type: str) -> Hashable:
    leaves, form = tree_flatten(given)
    precision = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    seen = tuple(
        (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
    )
    return str(form), seen, precision
