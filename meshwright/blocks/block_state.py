"""What the forward pass of a block reads and changes besides its input and output: buffers and attributes. A
recomputation has to begin with them as the first pass did, and to leave them as it finds them.

    before the first pass     `BlockState.record` copies tensors that may be written to
    recomputation             `PassRecord.replayed` gives the block the values of the first pass where the present ones
                              are others, and then the present ones again

Attributes are numbers, texts and tensors that a module holds directly. Lists, dicts and objects that a forward pass
changes are not seen.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from meshwright.blocks.power_iteration import power_iterations
from meshwright.errors import InputError

# A larger tensor, such as a mask or a table of positions, is copied in a block's first pass, and later only if a pass
# has written to it.
_ALWAYS_COPIED = 2**14  # elements
_OF_TORCH = frozenset(nn.Module().__dict__)  # attributes that every module has
_PLAIN = (bool, int, float, str, type(None))
_MISSING = object()  # the value of an attribute that was not there
_NOT_KEPT = object()  # the value of an attribute that is not given back
_Values = dict[str, Any]  # the buffers of a module by name, or its attributes


@dataclass
class _SeenTensor:
    """A tensor at the beginning of a pass. `copy` is None if it was not copied."""

    tensor: Tensor
    version: int
    copy: Tensor | None

    @property
    def is_written(self) -> bool:
        return _version(self.tensor) != self.version


@dataclass
class PassRecord:
    """What a forward pass of the block `name` has begun with."""

    name: str
    before: list[tuple[_Values, _Values]] = field(default_factory=list)  # buffers or attributes, and what they were
    tensors: dict[int, _SeenTensor] = field(default_factory=dict)  # those of `before`, by id

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Within this context, the block has the values of the pass. After it, it has its present ones again."""
        changes = [
            (values, name, values.get(name, _MISSING), value)
            for values, before in self.before
            for name, value in self._other_values(values, before)
        ]
        copies: dict[int, Tensor] = {}  # by id: modules may share a tensor
        for values, name, _, value in changes:
            if isinstance(value, Tensor) and id(value) not in copies:
                copies[id(value)] = value.clone()
            _assign(values, name, copies.get(id(value), value))
        try:
            yield
        finally:
            for values, name, present, _ in changes:
                _assign(values, name, present)

    def restore(self) -> None:
        """Gives the block the values from before the pass for good."""
        for values, before in self.before:
            for name, value in list(self._other_values(values, before)):
                seen = self.tensors.get(id(before.get(name, _MISSING)))
                if seen is not None and seen.is_written:
                    with torch.no_grad():
                        seen.tensor.copy_(value)
                _assign(values, name, seen.tensor if seen is not None else value)

    def _other_values(self, values: _Values, before: _Values) -> Iterator[tuple[str, Any]]:
        """Yields the names whose present values are not those of the pass, with the latter."""
        for name, value in before.items():
            seen = self.tensors.get(id(value))
            if seen is not None and seen.is_written:
                if seen.copy is None:
                    raise InputError(
                        f"memory.recompute: the forward pass writes to the tensor {name} of {self.name} or of a module"
                        " in it, but its first pass did not, so that no copy was kept for the recomputation: set"
                        " memory.recompute to none"
                    )
                yield name, seen.copy
            elif value is not _NOT_KEPT and values.get(name, _MISSING) is not value:
                yield name, value
        if len(values) > len(before):
            yield from ((name, _MISSING) for name in values if name not in before and name not in _OF_TORCH)


class BlockState:
    """Makes the records of one block's forward passes."""

    def __init__(self, name: str, block: nn.Module) -> None:
        self._name = name
        self._block = block
        self._is_first = True
        self._written: set[tuple[int, str]] = set()  # tensors that a pass has written to

    def new_record(self) -> PassRecord:
        return PassRecord(self._name)

    @contextmanager
    def record(self, record: PassRecord) -> Iterator[None]:
        """Runs a first pass of the block within this context, and fills the record."""
        record.before = [(values, _kept_values(values)) for values in self._values]
        named = [
            (number, name, value)
            for number, (_, before) in enumerate(record.before)
            for name, value in before.items()
            if isinstance(value, Tensor)
        ]
        with torch.no_grad():
            for number, name, tensor in named:
                is_copied = self._is_first or tensor.numel() <= _ALWAYS_COPIED or (number, name) in self._written
                if id(tensor) not in record.tensors or (is_copied and record.tensors[id(tensor)].copy is None):
                    copy = tensor.clone() if is_copied else None
                    record.tensors[id(tensor)] = _SeenTensor(tensor, _version(tensor), copy)
        yield
        for number, name, tensor in named:
            seen = record.tensors[id(tensor)]
            if seen.is_written:
                self._written.add((number, name))
                if (number, name) in self._iterated:  # power iteration is switched off in the recomputation
                    record.tensors[id(tensor)] = _SeenTensor(tensor, _version(tensor), tensor.detach().clone())
            elif tensor.numel() > _ALWAYS_COPIED and (number, name) not in self._written:
                seen.copy = None
        self._is_first = False

    @cached_property
    def _values(self) -> list[_Values]:
        """The buffers and the attributes of all modules, without BatchNorm, whose statistics are frozen otherwise."""
        modules = [module for module in self._block.modules() if not isinstance(module, _BatchNorm)]
        return [values for module in modules for values in (module._buffers, module.__dict__)]

    @cached_property
    def _iterated(self) -> set[tuple[int, str]]:
        """The buffers that power iteration improves, by their positions in `_values` and by name."""
        positions = {id(values): number for number, values in enumerate(self._values)}
        iterations = {id(iteration) for iteration in power_iterations(self._block)}
        names: set[tuple[int, str]] = set()
        for module in self._block.modules():
            hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
            vectors = [f"{hook.name}_{vector}" for hook in hooks for vector in ("u", "v")]
            vectors += list(module._buffers) if id(module) in iterations else []
            names |= {(positions[id(module._buffers)], vector) for vector in vectors}
        return names


def _kept_values(values: _Values) -> _Values:
    """What may have to be given back. A tensor with gradients, such as a loss that a forward pass leaves for others,
    belongs to the graph of an earlier pass, and is not."""
    return {
        name: value if isinstance(value, _PLAIN) or _is_own_tensor(value) else _NOT_KEPT
        for name, value in values.items()
        if name not in _OF_TORCH
    }


def _is_own_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.requires_grad


def _assign(values: _Values, name: str, value: Any) -> None:
    if value is _MISSING:
        values.pop(name, None)
    else:
        values[name] = value


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
