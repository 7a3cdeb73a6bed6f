"""Makes torch's functions for nested structures (pytrees) look into dataclasses and into mappings other than `dict`
(the `BatchEncoding` of transformers), which models may return and loaders may yield.

Without this, torch takes one of them for a single value: the tensors in it would not be converted by precision, nor
moved to the device, and FSDP2 would not find the tensors whose gradients it waits for.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node, tree_map

from meshwright.dtypes import TensorStandIn


def register_dataclasses(value: Any) -> None:
    """Registers with torch the classes of all dataclasses and mappings in a value, also those in tuples, lists, dicts
    and other dataclasses. Classes that are registered already, by their users or by a library, stay as they are."""
    if is_dataclass(value) and not isinstance(value, type):
        if type(value) not in SUPPORTED_NODES:
            _register(type(value))
        for field in fields(value):
            register_dataclasses(getattr(value, field.name, None))
    elif isinstance(value, Mapping):
        if type(value) not in SUPPORTED_NODES:
            _register_mapping(type(value))
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


def _register_mapping(kind: type[Any]) -> None:
    def flatten(value: Any) -> tuple[list[Any], list[Any]]:
        return list(value.values()), list(value.keys())

    def unflatten(values: Any, keys: list[Any]) -> Any:
        """Returns a mapping of the same class, or a dict if the class cannot be made of one."""
        entries = dict(zip(keys, values, strict=True))
        try:
            return kind(entries)
        except TypeError:
            return entries

    register_pytree_node(kind, flatten, unflatten)
