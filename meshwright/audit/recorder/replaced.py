"""`replace`: functions of others that the recorder replaces by its own, and how they are put back.

A process that `meshwright audit` started ends with its record, so nothing is put back there. `mw.record` puts back all
of them, also in modules that have imported a function under a name of their own."""

import sys
from typing import Any

_REPLACED: list[tuple[Any, str, Any, Any]] = []  # owner, name, the function that was there, ours
_INHERITED: list[tuple[Any, str]] = []  # those that the owner has from its class


def replace(owner: Any, name: str, function: Any) -> None:
    """Replaces an attribute of a module, a class or an object."""
    if name not in vars(owner):
        _INHERITED.append((owner, name))
    _REPLACED.append((owner, name, getattr(owner, name), function))
    setattr(owner, name, function)


def replace_imported() -> None:
    """Replaces the same functions in modules that have imported them: `from torch.nn.utils import clip_grad_norm_`."""
    _exchange({id(original): (original, own) for _, _, original, own in _REPLACED if callable(original)})


def put_back() -> None:
    """Puts back everything that was replaced."""
    _exchange({id(own): (own, original) for _, _, original, own in _REPLACED if callable(own)})
    while _REPLACED:
        owner, name, original, _ = _REPLACED.pop()
        if any(owner is other and name == inherited for other, inherited in _INHERITED):
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    _INHERITED.clear()


def _exchange(functions: dict[int, tuple[Any, Any]]) -> None:
    for module in list(sys.modules.values()):
        values = getattr(module, "__dict__", None)
        if type(values) is not dict:
            continue
        for name, value in list(values.items()):
            found = functions.get(id(value))
            if found is not None and found[0] is value:
                values[name] = found[1]
