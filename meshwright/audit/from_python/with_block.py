"""`recording`: records the training in a `with` block of this process, and puts everything back afterwards."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from meshwright.audit import recorder as package
from meshwright.audit.recorder import imports, patches
from meshwright.audit.recorder.recorder import RECORDERS, Recorder, recorder, use_recorder
from meshwright.audit.recorder.replaced import put_back, replace, replace_imported

_LIBRARIES: set[str] = set()  # the modules of libraries that were changed


def in_audit() -> Any:
    """The recorder of `meshwright audit` if that has started this process; otherwise None."""
    module = sys.modules.get("_meshwright_recorder.recorder")
    return None if module is None else module.recorder()


def is_recording() -> bool:
    return any(own.is_recording for own in RECORDERS)


@contextmanager
def recording(own: Recorder, model: nn.Module, optimizers: list[Any]) -> Iterator[None]:
    """Records the block. It may raise, and is recorded up to there."""
    use_recorder(own)
    try:
        _change_loaded([name for name in imports.WATCHED if name.startswith("torch.")])
        patches.watch_torch()
        replace_imported()
        own.begin([model])
        for optimizer in optimizers:
            _watch_step(optimizer)
        yield
    except BaseException as error:
        own.end("error", f"{type(error).__name__}: {error}")
        raise
    finally:
        own.end("exit")
        for handle in own.handles:
            handle.remove()
        put_back()


def watch_libraries() -> None:
    """Changes the libraries that are loaded, once in a process. They stay so, and call whichever recorder there is."""
    names = [name for name in imports.WATCHED if name.partition(".")[0] != "torch" and name not in _LIBRARIES]
    _LIBRARIES.update(_change_loaded(names))


def _change_loaded(names: list[str]) -> list[str]:
    """Returns the names of those that are loaded."""
    loaded = [name for name in names if name in sys.modules]
    for name in loaded:
        importlib.import_module(imports.WATCHED[name], package.__name__).after_import(sys.modules[name])
    return loaded


def _watch_step(optimizer: Any) -> None:
    """Listens to the steps of an optimizer that is none of torch, and has none inside of it: torch's hooks do not."""
    inside = vars(optimizer).values() if hasattr(optimizer, "__dict__") else ()
    if isinstance(optimizer, Optimizer) or any(isinstance(value, Optimizer) for value in inside):
        return
    original = optimizer.step

    def step(*arguments: Any, **named: Any) -> Any:
        recorder().gradients_computed(optimizer, recorder().before_optimizer_step())
        try:
            return original(*arguments, **named)
        finally:
            recorder().after_optimizer_step()

    replace(optimizer, "step", step)
