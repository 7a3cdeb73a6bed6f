"""What the rooms of other libraries (`compat/`) answer for the rooms below them, which import none of these. A function
is registered by its import path and imported when it is looked up, so only users of a library load its room."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

Purpose = Literal[
    "plan",  # by library: reads a configuration of the library for a number of ranks, and returns the groups of a plan
    "job",  # by library: reads a job file without an optimizer; None if the library does not train such a job
    "train",  # by `optimizer.call` of the jobs that "job" returns: trains them in the library's loop
    "call",  # by the import path that jobs of an earlier version have: what is called
]
_PATHS: dict[tuple[Purpose, str], str] = {}


def register(purpose: Purpose, name: str, path: str) -> None:
    """Registers the function that `path` (`package.module:name`) names."""
    _PATHS[purpose, name] = path


def names(purpose: Purpose) -> list[str]:
    """The names under which functions for this purpose are registered."""
    return [name for registered, name in _PATHS if registered == purpose]


def function(purpose: Purpose, name: str) -> Callable[..., Any]:
    """Imports and returns a registered function."""
    module, _, attribute = _PATHS[purpose, name].partition(":")
    found: Callable[..., Any] = getattr(import_module(module), attribute)
    return found
