"""What scripts import as `horovod` when Meshwright's launcher has started them: the modules of Horovod's PyTorch part,
each of which is one of `meshwright.compat.horovod`. The launcher puts this folder on the path of Python."""

import sys
from importlib import import_module
from types import ModuleType

_ROOM = "meshwright.compat.horovod"
# The names that scripts import, and the modules that they get. Names without a module are packages.
_MODULES = {
    "horovod.torch": _ROOM,
    "horovod.torch.mpi_ops": _ROOM,
    "horovod.torch.functions": f"{_ROOM}.functions",
    "horovod.torch.optimizer": f"{_ROOM}.optimizer",
    "horovod.torch.compression": f"{_ROOM}.compression",
    "horovod.torch.sync_batch_norm": f"{_ROOM}.sync_batch_norm",
    "horovod.torch.elastic": f"{_ROOM}.elastic",
    "horovod.torch.elastic.state": f"{_ROOM}.elastic.state",
    "horovod.torch.elastic.sampler": f"{_ROOM}.elastic.sampler",
    "horovod.common": "",
    "horovod.common.exceptions": f"{_ROOM}.exceptions",
    "horovod.common.process_sets": f"{_ROOM}.process_sets",
    "horovod.common.elastic": f"{_ROOM}.elastic.state",
    "horovod.common.util": f"{_ROOM}.basics",
    "horovod.runner": f"{_ROOM}.launcher.run_function",
    "horovod.runner.util": "",
    "horovod.runner.util.threads": f"{_ROOM}.launcher.threads",
    "horovod.runner.elastic": "",
    "horovod.runner.elastic.worker": f"{_ROOM}.elastic.state",
}


def _provide() -> None:
    for name, target in _MODULES.items():
        module = import_module(target) if target else ModuleType(name)
        if not target:
            module.__path__ = []
        sys.modules[name] = module
        parent, _, attribute = name.rpartition(".")
        if parent == "horovod" or not _MODULES[parent]:
            setattr(sys.modules[parent], attribute, module)


_provide()

from meshwright.compat.horovod.launcher.arguments import VERSION as __version__  # noqa: E402
from meshwright.compat.horovod.launcher.run_function import run  # noqa: E402

__all__ = ["__version__", "run"]
