"""The modules of DeepSpeed that scripts import, and what each of them has here. `provide` puts them into `sys.modules`,
so that `import deepspeed` and `from deepspeed.ops.adam import FusedAdam` find them."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_HERE = "meshwright.compat.deepspeed"
_SCHEDULES = "meshwright.compat.deepspeed_config.schedules"
# The name of a module of DeepSpeed, without `deepspeed.`, and the modules whose public names it has.
MODULES: dict[str, tuple[str, ...]] = {
    "accelerator": (f"{_HERE}.api.accelerator",),
    "checkpointing": (f"{_HERE}.api.utilities",),
    "comm": (f"{_HERE}.api.comm",),
    "comm.comm": (f"{_HERE}.api.comm",),
    "git_version_info": (f"{_HERE}.api.version",),
    "moe": (),
    "moe.layer": (f"{_HERE}.api.refused",),
    "moe.utils": (f"{_HERE}.api.refused",),
    "ops": (),
    "ops.adagrad": (f"{_HERE}.api.optimizers",),
    "ops.adam": (f"{_HERE}.api.optimizers",),
    "ops.lamb": (f"{_HERE}.api.optimizers",),
    "ops.lion": (f"{_HERE}.api.optimizers",),
    "ops.op_builder": (f"{_HERE}.api.op_builder",),
    "pipe": (f"{_HERE}.pipe",),
    "runtime": (),
    "runtime.activation_checkpointing": (),
    "runtime.activation_checkpointing.checkpointing": (f"{_HERE}.api.utilities",),
    "runtime.config": (f"{_HERE}.api.config",),
    "runtime.dataloader": (f"{_HERE}.api.dataloader",),
    "runtime.engine": (f"{_HERE}.engine", f"{_HERE}.api.config"),
    "runtime.fp16": (),
    "runtime.fp16.unfused_optimizer": (f"{_HERE}.api.refused",),
    "runtime.lr_schedules": (_SCHEDULES,),
    "runtime.pipe": (f"{_HERE}.pipe",),
    "runtime.pipe.engine": (f"{_HERE}.pipeline_engine",),
    "runtime.pipe.module": (f"{_HERE}.pipe",),
    "runtime.pipe.topology": (f"{_HERE}.pipe",),
    "runtime.precision_config": (f"{_HERE}.api.config",),
    "runtime.utils": (f"{_HERE}.api.utilities",),
    "runtime.zero": (f"{_HERE}.api.zero",),
    "runtime.zero.config": (f"{_HERE}.api.config",),
    "runtime.zero.partition_parameters": (f"{_HERE}.api.zero",),
    "utils": (f"{_HERE}.api.utilities",),
    "utils.logging": (f"{_HERE}.api.utilities",),
    "utils.torch": (f"{_HERE}.api.utilities",),
    "zero": (f"{_HERE}.api.zero",),
}


def provide() -> None:
    """Makes `import deepspeed` import the drop-in in this process, also if DeepSpeed is installed."""
    package = import_module(_HERE)
    sys.modules["deepspeed"] = package
    for name in MODULES:
        sys.modules[f"deepspeed.{name}"] = sys.modules[f"{_HERE}.{name}"]
    if not any(isinstance(finder, _OtherModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OtherModules())


def add_modules(package: ModuleType) -> None:
    """Gives the package `meshwright.compat.deepspeed` the submodules of DeepSpeed."""
    for name, sources in MODULES.items():
        module = _module(f"{_HERE}.{name}", sources)
        sys.modules.setdefault(module.__name__, module)
        parent, _, last = module.__name__.rpartition(".")
        setattr(package if parent == _HERE else sys.modules[parent], last, sys.modules[module.__name__])


def _module(name: str, sources: Sequence[str]) -> ModuleType:
    """A module with the public names of others. It counts as a package, so that it may have modules of its own."""
    module = ModuleType(name, "What DeepSpeed's module of this name has.")
    module.__path__ = []
    for source in sources:
        for key, value in vars(import_module(source)).items():
            if not key.startswith("_"):
                setattr(module, key, value)
    return module


class _OtherModules(MetaPathFinder):
    """Explains imports of modules of DeepSpeed that the drop-in does not have."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.startswith("deepspeed."):
            raise ModuleNotFoundError(
                f"meshwright's drop-in for DeepSpeed has no module {fullname} (docs/deepspeed.md lists what it has)",
                name=fullname,
            )
