"""Where training starts: initial weights as a function of (seed, parameter name), for any `nn.Module`.

While the model's own code builds it, a recorder notes which random fills reached which memory. Afterwards
each parameter's fills are run again under a seed made of its name, so adding a layer or building in another
order leaves all other weights as they were. A parameter computed from other random tensors (an orthogonal
matrix, a scaled `randn`) keeps the value its code gave it, which follows the seed and the order of building.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.data.order import derive

Replay = Callable[[], object]


def initialized(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Builds a model with `make`; the caller's random generators are left as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        with _FillRecorder() as recorder:
            model = make()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                fills = recorder.fills.get(_memory(tensor))
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
        self._alive: list[torch.UntypedStorage] = []  # memory that is freed would be given out again

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        random = torch.Tag.nondeterministic_seeded in func.tags
        if func._schema.is_mutable:
            if args and isinstance(args[0], Tensor):
                self._note(args[0], random, lambda: func(*args, **kwargs))
        elif random and isinstance(result, Tensor):
            self._note(result, random, lambda: result.copy_(func(*args, **kwargs)))
        return result

    def _note(self, tensor: Tensor, random: bool, replay: Replay) -> None:
        key = _memory(tensor)
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        if random and (whole or key not in self.fills):
            self.fills[key] = []
            self._alive.append(tensor.untyped_storage())
        if key in self.fills:
            self.fills[key].append(replay)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
