"""Hooks on modules that were registered after `parallelize`. Those that are registered before are part of the model
that a plan divides and that is checked, and so are those that its own forward pass registers; later ones see what a
rank has of a value, and may be on some ranks only. A hook that only looks is of no concern, so each new hook is watched
for whether it changes anything."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from meshwright.errors import InputError
from meshwright.parallel.model import ParallelModel
from meshwright.train.loop_checks.settings import HOOK
from meshwright.train.torch_private import module_hooks, tensors_in
from meshwright.user.code import is_machinery, line_of_function


class ModuleHooks:
    """Watches the hooks of a model's modules that are new since the plan has divided the model."""

    def __init__(self, parallel: ParallelModel) -> None:
        self._module, self._plan = parallel.module, parallel.plan
        self._known = {(id(hooks), key) for _, hooks in self._all() for key in hooks}
        self._registered = RemovableHandle.next_id

    def watch_new(self) -> None:
        """Watches hooks that were registered since the last call. Called before each forward pass."""
        if RemovableHandle.next_id == self._registered:  # counts all hooks of the process
            return
        for _, hooks in self._all():
            for key, hook in hooks.items():
                if (id(hooks), key) not in self._known and not isinstance(hook, _WatchedHook) and _code_of(hook):
                    hooks[key] = _WatchedHook(hook)
        self._registered = RemovableHandle.next_id

    def know_own(self) -> None:
        """Called after each forward pass: hooks that were registered in it are the model's own."""
        if RemovableHandle.next_id == self._registered:
            return
        for _, hooks in self._all():
            self._known |= {(id(hooks), key) for key in hooks if key >= self._registered}
        self._registered = RemovableHandle.next_id

    def changing(self) -> dict[str, str]:
        """Returns where new hooks have changed something, by what they are registered with."""
        return {f"{HOOK}{name or 'the model'}": hook.where for name, hook in self._changing()}

    def check(self) -> None:
        """Raises an `InputError` if a new hook has changed something that the plan divides."""
        axes = self._plan.axes
        if axes.tensor == axes.context == axes.pipeline == axes.expert == 1:
            return
        for name, hook in self._changing():
            raise InputError(
                f"the hook {hook.where} was registered with {name or 'the model'} after parallelize and changes what it"
                f" is called with, of which the plan ({self._plan.summary()}) gives each rank a part: register it"
                " before parallelize"
            )

    def _changing(self) -> Iterator[tuple[str, "_WatchedHook"]]:
        for name, hooks in self._all():
            for hook in hooks.values():
                if isinstance(hook, _WatchedHook) and hook.changes:
                    yield name, hook

    def _all(self) -> Iterator[tuple[str, dict[int, Any]]]:
        for name, module in self._module.named_modules():
            for hooks in module_hooks(module):
                yield name, hooks


class _WatchedHook:
    """Calls a hook. `changes` says whether it has ever returned something, or written to a tensor that it got."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook
        self.changes = False
        self.where = f"{getattr(hook, '__name__', type(hook).__name__)} ({line_of_function(_code_of(hook))})"

    def __call__(self, module: nn.Module, *arguments: Any) -> Any:
        before = [tensor._version for tensor in tensors_in(arguments)]
        result = self._hook(module, *arguments)
        if result is not None or before != [tensor._version for tensor in tensors_in(arguments)]:
            self.changes = True
        return result


def _code_of(hook: Any) -> Any:
    """Returns the function that a hook runs; None if it is one of torch or of meshwright, or not written in Python."""
    function = getattr(hook, "func", hook)
    function = getattr(function, "__func__", function)
    written = function if hasattr(function, "__code__") else getattr(type(function), "__call__", None)  # noqa: B004
    code = getattr(written, "__code__", None)
    return None if code is None or is_machinery(code.co_filename) else written
