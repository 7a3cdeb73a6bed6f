"""`watch_imports`: runs functions of the recorder right after certain modules of others were imported."""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

# The module of others → our module whose `after_import` is called with it.
WATCHED = {
    "torch": ".patches",
    "torch.distributed.fsdp.fully_sharded_data_parallel": ".libraries.fsdp1",
    "deepspeed.runtime.engine": ".libraries.deepspeed",
    "megatron.core.optimizer.clip_grads": ".libraries.megatron",
    "megatron.core.transformer.module": ".libraries.megatron",
}


def watch_imports() -> None:
    """From now on, modules in `WATCHED` are changed by our functions when they are imported."""
    sys.meta_path.insert(0, _Watcher())


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds a watched module as the other finders would, and calls our function after the module was executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in WATCHED:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        if spec.loader is not None:
            spec.loader = _NotifyingLoader(spec.loader, name)
        return spec


class _NotifyingLoader(importlib.abc.Loader):
    """Executes a module with its own loader, and calls our function afterwards."""

    def __init__(self, loader: importlib.abc.Loader, name: str) -> None:
        self.loader, self.name = loader, name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self.loader  # as it would be without us, for everything that looks at it
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        after_import: Callable[[ModuleType], None]
        after_import = importlib.import_module(WATCHED[self.name], __package__).after_import
        after_import(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self.loader, name)
