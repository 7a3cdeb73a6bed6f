"""Runs a part of a save or a load on several ranks so that all of them succeed, or all of them raise the same error. An
exception that stayed on one rank would leave the others waiting for it."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from meshwright.errors import CheckpointError, InputError, MeshwrightError, StorageError
from meshwright.messages.exchange import all_gather_values, broadcast_value

T = TypeVar("T")


def on_all_ranks(compute: Callable[[], T]) -> T:
    """Returns what `compute` returns on this rank, when it has succeeded on all ranks. If it raises an exception on any
    rank, every rank raises the first one, as a `MeshwrightError`."""
    value, error = _attempt(compute)
    for problem in all_gather_values(_description(error)):
        _raise(problem, error)
    result: T = value
    return result


def gather_results(compute: Callable[[], Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns what `compute` returns on each rank: plain values. If it raises an exception on any rank, every rank
    raises the first one, as a `MeshwrightError`. `group` has all ranks; a thread that runs beside training needs one of
    its own."""
    value, error = _attempt(compute)
    results = all_gather_values([value, _description(error)], group)
    for _, problem in results:
        _raise(problem, error)
    return [value for value, _ in results]


def from_first_rank(compute: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Calls `compute` on rank 0, and returns its result, a plain value, on every rank. If it raises an exception, every
    rank raises it as a `MeshwrightError`. `group` is as in `gather_results`."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    value, error = _attempt(compute) if is_first else (None, None)
    value, problem = broadcast_value([value, _description(error)], group)
    _raise(problem, error)
    return value


def _attempt(compute: Callable[[], Any]) -> tuple[Any, MeshwrightError | None]:
    """Returns what `compute` returns and None, or None and the exception that it raises."""
    try:
        return compute(), None
    except MeshwrightError as error:
        return None, error
    except Exception as error:
        message = " ".join(str(error).split())[:300]
        problem = CheckpointError(f"the checkpoint cannot be saved or loaded: {type(error).__name__}: {message}")
        problem.__cause__ = error
        return None, problem


def _description(error: MeshwrightError | None) -> list[str] | None:
    return None if error is None else [type(error).__name__, str(error)]


def _raise(description: list[str] | None, error: MeshwrightError | None) -> None:
    """Raises the error that is described, if there is one. `error` is that of this rank, or None."""
    if description is None:
        return
    if error is not None and str(error) == description[1]:
        raise error
    kinds = {kind.__name__: kind for kind in (InputError, StorageError)}
    raise kinds.get(description[0], CheckpointError)(description[1])
