"""Makes torchvision importable when it was built for another version of torch, for whatever imports it: a job, a user's
file, timm or transformers. Such a torchvision cannot load its compiled operators, and its import fails because two of
them are undefined. Its models and data sets call neither of the two, so defining the signatures of both is enough."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_operators: list[Any] = []  # torch drops a library's operators when the last reference to it is gone


def mend_torchvision() -> None:
    """From now on, an import of torchvision that fails for this reason is tried again with the operators defined."""
    if not any(isinstance(finder, _TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchvisionFinder())


class _TorchvisionFinder(MetaPathFinder):
    """Finds torchvision where Python finds it, and changes how it is executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == "torchvision" else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        execute(module)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name.startswith("torchvision.")]:
            del sys.modules[name]
        _define_operators()
        execute(module)


def _define_operators() -> None:
    if _operators:
        return
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _operators.append(library)
