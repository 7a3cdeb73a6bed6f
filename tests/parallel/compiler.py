"""Replaces the default backend of `torch.compile`, which takes seconds for each function, in tests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.utils import counters


@contextmanager
def compiling_with(backend: str | Callable[..., Any] | None) -> Iterator[None]:
    """A context in which functions are compiled with this backend; None for the default one. Counters begin at 0."""
    compile_function = torch.compile

    def compile_quickly(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        options.pop("mode", None)
        return compile_function(function, **{"backend": backend, **options})

    if backend is not None:
        torch.compile = compile_quickly  # type: ignore[assignment]
    torch._dynamo.reset()
    counters.clear()
    try:
        yield
    finally:
        torch.compile = compile_function


def compiled_graphs() -> int:
    """The number of graphs that were compiled since the context was entered."""
    return counters["stats"]["unique_graphs"]
