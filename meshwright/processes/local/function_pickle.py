"""The pickles of `mw.launch`: the function and its arguments on their way to the ranks, and the value that rank 0
returns on its way back. Functions and classes of a script or a notebook travel by value, because ranks cannot import
them; those of other modules travel by name, and ranks import the modules.

Reading a pickle executes code. Here that is intended: it is the user's own function, in processes that the user's own
process has started. Nobody else can write what they read: the pickles go through a pair of sockets that has no name.
"""

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

from meshwright.errors import InputError, RankError
from meshwright.user.code import first_line


def pickle_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    try:
        return _pickle((function, args, dict(kwargs)))
    except Exception as error:
        raise InputError(
            f"{name_of(function)} cannot be sent to the ranks with its arguments and the variables that it uses:"
            f" {_summary(error)}; create inside the function what cannot be copied to another process"
        ) from None


def unpickle_call(pickled: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    function, args, kwargs = pickle.loads(pickled)
    return function, args, kwargs


def pickle_value(value: Any, function: Callable[..., Any]) -> bytes:
    try:
        return _pickle(value)
    except Exception as error:
        raise InputError(
            f"what {name_of(function)} returned, an object of class {type(value).__name__}, cannot be sent from rank 0"
            f" to the process that called mw.launch: {_summary(error)}; return numbers, texts, tensors or a"
            " state_dict"
        ) from None


def unpickle_value(pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled)
    except Exception as error:
        raise RankError(f"the value that rank 0 returned cannot be read here: {_summary(error)}") from None


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _pickle(value: Any) -> bytes:
    pickled: bytes = cloudpickle.dumps(value)
    return pickled
