"""Names the module of a model in which an error was raised."""

from traceback import walk_tb
from typing import Any

from torch import nn

from meshwright.errors import chain_of


def where_it_failed(error: BaseException, model: nn.Module) -> str:
    """Returns ` in NAME (CLASS)` for the innermost module of the model whose code was running, or was compiled, when
    the error was raised; an empty text if it was none, as in a backward pass."""
    modules = {id(module): name for name, module in model.named_modules()}
    running: nn.Module | None = None
    for seen in chain_of(error):
        for frame, _ in walk_tb(seen.__traceback__):
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in modules:
                running = owner
    running = _compiled_module(error, model) or running
    if running is None:
        return ""
    name = modules[id(running)] or "the model"
    return f" in {name} ({type(running).__name__})"


def _compiled_module(error: BaseException, model: nn.Module) -> nn.Module | None:
    """The module whose forward pass the compiler was looking at. Its errors have the lines of code, but no frames."""
    for seen in chain_of(error):
        for line in reversed(getattr(seen, "real_stack", None) or ()):
            for module in model.modules():
                if _is_in_forward(line, module):
                    return module
    return None


def _is_in_forward(line: Any, module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    if code is None or line.filename != code.co_filename:
        return False
    numbers = [number for _, _, number in code.co_lines() if number is not None]
    return min(numbers) <= line.lineno <= max(numbers)
