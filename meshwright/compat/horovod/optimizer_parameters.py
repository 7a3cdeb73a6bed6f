"""The names of the parameters of a `DistributedOptimizer`, by which ranks match gradients, and how they are grouped."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

Groups = int | list[list[Tensor]] | None


def names_of_parameters(
    param_groups: list[dict[str, Any]], named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Returns the name of each parameter. Raises `ValueError` if names are missing or not unique."""
    groups = [group["params"] for group in param_groups]
    if named_parameters is None:
        return {
            parameter: f"allreduce.noname.{i}.{j}"
            for i, parameters in enumerate(groups)
            for j, parameter in enumerate(parameters)
        }
    named = list(named_parameters)
    if any(not isinstance(entry, tuple) for entry in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by"
            " model.named_parameters()."
        )
    duplicates = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    names = {parameter: name for name, parameter in named}
    unnamed = [tuple(parameter.shape) for parameters in groups for parameter in parameters if parameter not in names]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: those of shapes"
            f" {', '.join(map(str, unnamed))}"
        )
    return names


def call_when_gradients_are_ready(
    parameters: Iterable[Tensor], method: Callable[[Tensor], None]
) -> list[RemovableHandle]:
    """Lets the backward pass call a method of an optimizer with each parameter whose gradient is ready, as long as the
    optimizer lives: a script may wrap the same parameters in another optimizer later."""
    reference = weakref.WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        if (live := reference()) is not None:
            live(parameter)

    return [parameter.register_post_accumulate_grad_hook(hook) for parameter in parameters]


def check_groups(groups: Any) -> None:
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups > 0):
        return
    if not isinstance(groups, list):
        raise ValueError(f"groups={groups!r}: should be a positive integer or a list of lists of torch.Tensor.")
    grouped: set[int] = set()
    for parameter in (parameter for group in groups for parameter in group):
        if not isinstance(parameter, Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if id(parameter) in grouped:
            raise ValueError("A parameter can only appear once in groups.")
        grouped.add(id(parameter))


def group_parameters(groups: Groups, parameters: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """Returns the parameters in groups that are reduced together. A number makes as many groups of consecutive
    parameters; parameters that no list names are groups of their own."""
    assert groups is not None
    if isinstance(groups, int):
        size, rest = divmod(len(parameters), groups)
        bounds = [i * size + min(i, rest) for i in range(groups + 1)]
        return [tuple(parameters[begin:end]) for begin, end in pairwise(bounds) if end > begin]
    trained = set(parameters)
    chosen = [tuple(parameter for parameter in group if parameter in trained) for group in groups]
    named = {parameter for group in chosen for parameter in group}
    return [group for group in chosen if group] + [(parameter,) for parameter in parameters if parameter not in named]
