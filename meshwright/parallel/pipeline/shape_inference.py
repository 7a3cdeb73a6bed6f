"""A forward pass of the whole model without memory: it tells the shapes of what crosses each cut, and of what every
module returns, for inputs of given shapes. Buffers, random numbers and counters of the model are left alone."""

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map

from meshwright.batch import Example
from meshwright.parallel.pipeline.remote_modules import tensors_in
from meshwright.parallel.pipeline.transport import Line, line_of
from meshwright.parallel.pipeline.wiring import Call, Spot, Wiring

_KEPT = 64  # signatures: batches of many lengths would fill the memory


@dataclass(frozen=True)
class Notes:
    """What each call returns, without memory, and each crossing value by its number."""

    returned: dict[Call, Any]
    lines: dict[int, Line]


class Rehearsal:
    """Keeps the model without memory, and what was found for each kind of input."""

    def __init__(self, bare: nn.Module, wiring: Wiring, device: torch.device) -> None:
        # Real tensors may meet tensors without memory: the result has none.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.twin = without_memory(bare, lambda tensor: self._fake(tensor, device))
        self._wiring = wiring
        self._found: dict[Hashable, Notes] = {}
        self._device = device

    def notes(self, example: Example, training: bool, precision: Callable[[], AbstractContextManager[Any]]) -> Notes:
        key = (_signature((example.arguments, example.keywords)), training, torch.is_grad_enabled())
        if key not in self._found:
            if len(self._found) >= _KEPT:
                self._found.pop(next(iter(self._found)))
            self._found[key] = self._rehearse(example, training, precision)
        return self._found[key]

    def _rehearse(
        self, example: Example, training: bool, precision: Callable[[], AbstractContextManager[Any]]
    ) -> Notes:
        made: dict[Call, list[tuple[int, int]]] = {}
        used: dict[Call, list[tuple[int, int]]] = {}
        for port in (port for ports in self._wiring.ports for port in ports):
            spots: Iterable[Spot] = (port.made,) if port.made else port.used
            for spot in spots:
                (made if port.made else used).setdefault(spot.call, []).append((spot.leaf, port.value))
        notes = Notes({}, {})
        calls: Counter[str] = Counter()

        def note(places: list[tuple[int, int]], tree: Any) -> None:
            leaves = tensors_in(tree) if places else []
            for leaf, value in places:
                notes.lines[value] = line_of(leaves[leaf])

        handles = []
        for name in self._wiring.pieces:

            def before(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
                note(used.get((name, calls[name]), []), (args, kwargs))

            def after(_: Any, __: Any, output: Any, name: str = name) -> None:
                call = (name, calls[name])
                calls[name] += 1
                note(made.get(call, []), output)
                notes.returned[call] = tree_map(
                    lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output
                )

            piece = self.twin.get_submodule(name)
            handles.append(piece.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(piece.register_forward_hook(after))
        self.twin.train(training)
        try:
            with self.mode:
                args, kwargs = tree_map(
                    lambda leaf: self._fake(leaf, self._device) if isinstance(leaf, Tensor) else leaf,
                    (example.arguments, example.keywords),
                )
            with self.mode, precision():
                self.twin(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return notes

    def _fake(self, tensor: Tensor, device: torch.device) -> Tensor:
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def bare_copy(model: nn.Module) -> nn.Module:
    """The model on the meta device."""
    return without_memory(
        model, lambda tensor: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    )


def without_memory(model: nn.Module, empty: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy whose parameters and buffers are replaced; tied ones stay tied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(empty(parameter.detach()), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = empty(buffer)
    twin = copy.deepcopy(model, memo)
    forget_caches(twin)
    return twin


def forget_caches(model: nn.Module) -> None:
    """What generation keeps is no part of training."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def _signature(tree: Any) -> Hashable:
    leaves, form = tree_flatten(tree)
    return str(form), tuple(
        (tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
    )
