"""Puts the code of a changed file into the functions of a process that has imported the original, which saves importing
torch and the tests again for each change."""

import gc
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from validation.mutations.sites import Mutant

Functions = dict[tuple[str, int, str], list[FunctionType]]


def functions_of(folder: str) -> Functions:
    """Returns the functions of the files below a folder by file, first line and name."""
    gc.unfreeze()
    found: Functions = {}
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename.startswith(folder):
            found.setdefault(_key(one.__code__), []).append(one)
    gc.freeze()
    return found


def can_replace(functions: Functions, mutant: Mutant, source: str, path: str) -> bool:
    """Whether the change is in a function that is imported, and which keeps the variables that it takes from others."""
    codes = [code for code in _codes(compile(source, path, "exec")) if _contains(code, mutant.line)]
    return (
        mutant.in_function
        and bool(codes)
        and _key(codes[0]) in functions
        and all(map(_is_alike, *_pairs(functions, codes)))
    )


def replace(functions: Functions, source: str, path: str) -> None:
    for function, code in zip(*_pairs(functions, _codes(compile(source, path, "exec"))), strict=True):
        if _is_alike(function, code):
            function.__code__ = code


def _pairs(functions: Functions, codes: Any) -> tuple[list[FunctionType], list[CodeType]]:
    pairs = [(function, code) for code in codes for function in functions.get(_key(code), [])]
    return [function for function, _ in pairs], [code for _, code in pairs]


def _is_alike(function: FunctionType, code: CodeType) -> bool:
    return len(function.__code__.co_freevars) == len(code.co_freevars)


def _key(code: CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_name


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yields the functions of a file, those of classes included, from the outside to the inside."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _contains(code: CodeType, line: int) -> bool:
    """Whether a function, which is no body of a class, has the line."""
    numbers = [number for _, _, number in code.co_lines() if number is not None]
    return bool(code.co_flags & 0x2) and min(numbers) <= line <= max(numbers)  # CO_NEWLOCALS
