"""Where training starts: initial weights as a function of (seed, parameter name), for any `nn.Module`.

While the model's own code builds it, a recorder notes which random fills reached which memory. Afterwards
each parameter's fills are run again under a seed made of its name, so adding a layer or building in another
order leaves all other weights as they were. A parameter computed from other random tensors (a scaled `randn`) keeps
the value its code gave it, which follows the seed and the order of building.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.data.order import derive

Replay = Callable[[], object]
# Of torch.nn.init, those that look at what they drew, or compute with it: they are run again as a whole.
_UNITS = {"trunc_normal_": True, "orthogonal_": True, "sparse_": True, "dirac_": False}  # whether by chance


def initialized(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Builds a model with `make`; the caller's random generators are left as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        with _FillRecorder() as recorder, init_units(recorder.unit):
            model = make()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                fills = recorder.fills.get(memory_of(tensor))
                if fills:
                    torch.manual_seed(derive(seed, "weights", name))
                    for fill in fills:
                        fill()
    return model


class _FillRecorder(TorchDispatchMode):
    """Notes, by memory, the random operations that filled a tensor and every in-place one after them."""

    def __init__(self) -> None:
        super().__init__()
        self.fills: dict[int, list[Replay]] = {}
        self._paused = False
        self._alive: list[torch.UntypedStorage] = []  # memory that is freed would be given out again

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._paused:
            return result
        random = torch.Tag.nondeterministic_seeded in func.tags
        if func._schema.is_mutable:
            if args and isinstance(args[0], Tensor):
                self._note(args[0], random, lambda: func(*args, **kwargs))
        elif random and isinstance(result, Tensor):
            self._note(result, random, lambda: result.copy_(func(*args, **kwargs)))
        return result

    def unit(self, random: bool, function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        self._paused = True
        try:
            function(tensor, *args, **kwargs)
        finally:
            self._paused = False
        self._note(tensor, random, lambda: function(tensor, *args, **kwargs))

    def _note(self, tensor: Tensor, random: bool, replay: Replay) -> None:
        key = memory_of(tensor)
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        if random and whole:
            self.fills[key] = []
            self._alive.append(tensor.untyped_storage())
        elif random and key not in self.fills:
            # What lies beside the random part is put back before operations on all of it run again.
            room = tensor.new_empty(0).set_(tensor.untyped_storage())
            before = room.clone()
            self.fills[key] = [lambda: room.copy_(before)]
            self._alive.append(tensor.untyped_storage())
        if key in self.fills:
            self.fills[key].append(replay)


@contextmanager
def init_units(run: Callable[..., None]) -> Iterator[None]:
    """Within it, those functions of torch.nn.init that are units are run by `run(random, function, tensor, …)`."""
    before = {name: getattr(nn.init, name) for name in _UNITS}

    def instead(name: str) -> Callable[..., Tensor]:
        @wraps(before[name])
        def unit(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            run(_UNITS[name], before[name], tensor, *args, **kwargs)
            return tensor

        return unit

    try:
        for name in _UNITS:
            setattr(nn.init, name, instead(name))
        yield
    finally:
        for name, function in before.items():
            setattr(nn.init, name, function)


def memory_of(tensor: Tensor) -> int:
    """Tells memories apart as long as they are held."""
    return tensor.untyped_storage()._cdata
