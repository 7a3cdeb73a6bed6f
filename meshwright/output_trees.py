"""Makes torch's functions for nested structures (pytrees) look into dataclasses, which models may return.

Without this, torch takes a dataclass for a single value: the tensors in it would not be converted by precision, and
FSDP2 would not find the tensors whose gradients it waits for.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node, tree_map

from meshwright.dtypes import TensorStandIn


def register_dataclasses(value: Any) -> None:
    """Registers with torch the classes of all dataclasses in a value, also those in tuples, lists, dicts and other
    dataclasses. Classes that are registered already, by their users or by a library, stay as they are."""
    if is_dataclass(value) and not isinstance(value, type):
        if type(value) not in SUPPORTED_NODES:
            _register(type(value))
        for field in fields(value):
            register_dataclasses(getattr(value, field.name, None))
    elif isinstance(value, Mapping):
        for entry in value.values():
            register_dataclasses(entry)
    elif isinstance(value, tuple | list):
        for entry in value:
            register_dataclasses(entry)


def map_traced(function: Callable[[Any], Any], value: Any) -> Any:
    """`tree_map` in a function that torch compiles: nothing is registered, and the compiler sees code that each of its
    versions can trace."""
    if isinstance(value, (Tensor, TensorStandIn)):
        return function(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) is tuple or type(value) is list:
        return type(value)([map_traced(function, entry) for entry in value])
    if type(value) is dict:
        return {name: map_traced(function, entry) for name, entry in value.items()}
    if type(value) in SUPPORTED_NODES:  # registered by the library that it comes from, or before the compiler ran
        return tree_map(function, value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    copy = object.__new__(type(value))
    for field in fields(value):
        if hasattr(value, field.name):
            object.__setattr__(copy, field.name, map_traced(function, getattr(value, field.name)))
    return copy


def _register(kind: type[Any]) -> None:
    names = [field.name for field in fields(kind)]

    def flatten(value: Any) -> tuple[list[Any], list[str]]:
        present = [name for name in names if hasattr(value, name)]
        return [getattr(value, name) for name in present], present

    def unflatten(values: Any, present: list[str]) -> Any:
        """Sets the fields without calling the class, whose `__init__` may take something else than its fields."""
        copy = object.__new__(kind)
        for name, value in zip(present, values, strict=True):
            object.__setattr__(copy, name, value)
        return copy

    register_pytree_node(kind, flatten, unflatten)
