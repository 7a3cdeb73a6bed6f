"""Initial weights as a function of (seed, parameter name), for any `nn.Module`.

While the model's own code builds it, a recorder notes which random operators filled which memory. Afterwards the
operators of each parameter run again under a seed derived from its name, so adding a layer or building layers in
another order does not change the other weights. A parameter that is computed from other random tensors (a scaled
`randn`) keeps the value that its code gave it, which depends on the seed and on the order of building.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.data.order import derive_seed
from meshwright.parallel.torch_private import TorchDispatchMode, operator_schema, storage_id

Replay = Callable[[], object]
# Functions of torch.nn.init that look at the numbers they drew, or compute with them: replaying their operators one by
# one would not give the same result, so each is recorded as one operation. True where it draws random numbers.
_WHOLE_FUNCTIONS = {"trunc_normal_": True, "orthogonal_": True, "sparse_": True, "dirac_": False}


def initialize_model(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The model that `build` returns, with initial weights that depend on the seed and their names only. The caller's
    random generators are left as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        with _FillRecorder() as recorder, intercept_init_functions(recorder.run_whole):
            model = build()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                fills = recorder.fills.get(storage_id(tensor))
                if fills:
                    torch.manual_seed(derive_seed(seed, "weights", name))
                    for fill in fills:
                        fill()
    return model


class _FillRecorder(TorchDispatchMode):
    """Records, by memory, the random operators that filled a tensor and every in-place operator after them."""

    def __init__(self) -> None:
        super().__init__()
        self.fills: dict[int, list[Replay]] = {}
        self._is_paused = False
        self._storages: list[torch.UntypedStorage] = []  # kept alive, since freed memory would be allocated again

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._is_paused:
            return result
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if operator_schema(func).is_mutable:
            if args and isinstance(args[0], Tensor):
                self._record(args[0], is_random, lambda: func(*args, **kwargs))
        elif is_random and isinstance(result, Tensor):
            self._record(result, is_random, lambda: result.copy_(func(*args, **kwargs)))
        return result

    def run_whole(
        self, is_random: bool, function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Runs a function of torch.nn.init and records it as one operation."""
        self._is_paused = True
        try:
            function(tensor, *args, **kwargs)
        finally:
            self._is_paused = False
        self._record(tensor, is_random, lambda: function(tensor, *args, **kwargs))

    def _record(self, tensor: Tensor, is_random: bool, replay: Replay) -> None:
        key = storage_id(tensor)
        fills_storage = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        if is_random and fills_storage:
            self.fills[key] = []
            self._storages.append(tensor.untyped_storage())
        elif is_random and key not in self.fills:
            # Only a part is random. The rest is restored first, since operators on the whole memory may follow.
            whole = tensor.new_empty(0).set_(tensor.untyped_storage())
            before = whole.clone()
            self.fills[key] = [lambda: whole.copy_(before)]
            self._storages.append(tensor.untyped_storage())
        if key in self.fills:
            self.fills[key].append(replay)


@contextmanager
def intercept_init_functions(run: Callable[..., None]) -> Iterator[None]:
    """Inside this context `run(is_random, function, tensor, …)` is called in place of those functions of torch.nn.init
    that have to be recorded as one operation."""
    originals = {name: getattr(nn.init, name) for name in _WHOLE_FUNCTIONS}

    def intercepted(name: str) -> Callable[..., Tensor]:
        @wraps(originals[name])
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            run(_WHOLE_FUNCTIONS[name], originals[name], tensor, *args, **kwargs)
            return tensor

        return call

    try:
        for name in _WHOLE_FUNCTIONS:
            setattr(nn.init, name, intercepted(name))
        yield
    finally:
        for name, function in originals.items():
            setattr(nn.init, name, function)
