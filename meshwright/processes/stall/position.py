"""Where a thread is, read from its Python stack: the module whose forward pass runs, the collective that it called, and
the line of the user's code. Nothing is recorded while steps run, so it costs them nothing."""

import gc
import linecache
import re
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, repeat
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from meshwright.user.code import is_user_file as _is_user_file

is_user_file = cache(_is_user_file)  # the watchdog asks for the same files again and again
StackEntry = tuple[FrameType, int]  # a frame and its current line

_MODULE_CALL = re.compile(r"torch[/\\]nn[/\\]modules[/\\]module\.py$")
_FULLY_SHARD = re.compile(r"torch[/\\]distributed[/\\]fsdp[/\\]_fully_shard[/\\]")
_WAIT = re.compile(r"\.wait\(|wait_tensor|\bsynchronize\(|\.barrier\(")
_LOADER = re.compile(r"torch[/\\]utils[/\\]data[/\\]dataloader\.py$")
_PARALLEL = "meshwright.parallel."  # modules that run the user's model, such as a stage of a pipeline
_BACKWARD = re.compile(r"torch[/\\]autograd[/\\]graph\.py$")
# What ranks exchange in files of ours and of torch, by a part of the path. The innermost file counts.
_EXCHANGES = (
    (re.compile(r"meshwright[/\\]parallel[/\\]replicate[/\\]batch_norm\.py$"), "sums of BatchNorm"),
    (re.compile(r"meshwright[/\\]parallel[/\\]replicate[/\\](gradient|local)"), "gradient exchange"),
    (
        re.compile(r"meshwright[/\\]parallel[/\\]tensor[/\\]|torch[/\\]distributed[/\\]tensor[/\\]"),
        "exchange of a split layer",
    ),
    (
        re.compile(r"meshwright[/\\]parallel[/\\]pipeline[/\\]|torch[/\\]distributed[/\\]pipelining[/\\]"),
        "send or receive of the pipeline",
    ),
    (
        re.compile(r"meshwright[/\\]checkpoint[/\\]|torch[/\\]distributed[/\\]checkpoint[/\\]"),
        "exchange of a checkpoint",
    ),
    (re.compile(r"meshwright[/\\]train[/\\]stop_agreement\.py$"), "agreement on whether to stop"),
    (re.compile(r"meshwright[/\\]train[/\\]step[/\\]evaluation\.py$"), "sums of the evaluation"),
    (re.compile(r"meshwright[/\\]parallel[/\\]clip\.py$"), "sum of the gradient's norm"),
)


@dataclass(frozen=True)
class Position:
    """Where a thread is. `module` is the module whose forward pass runs, by its name in the model; empty outside of
    forward passes. `place` is a function with file and line, of the user's code if any of it runs. `operation` is the
    function of torch.distributed that it called, such as `all-reduce`, or `wait`; empty if it called none. `exchange`
    is what is exchanged in it, if the files on the stack tell that."""

    module: str
    place: str
    operation: str
    exchange: str


def stack_of(frame: FrameType | None) -> list[StackEntry]:
    """Returns the stack of a running thread, the innermost frame last. It is followed by a single call in C, during
    which the thread cannot go on: `f_back` of a frame that has just ended was seen to crash the interpreter."""
    frames: deque[Any] = deque()
    collects = gc.isenabled()
    gc.disable()  # a collection would let the thread go on
    try:
        with suppress(AttributeError):  # the frame before the outermost one is None
            frames.extend(accumulate(repeat("f_back"), getattr, initial=frame))
    finally:
        if collects:
            gc.enable()
    stack = [frame for frame in frames if isinstance(frame, FrameType)]
    return [(frame, frame.f_lineno or 0) for frame in reversed(stack)]  # code that was just entered has no line yet


def stack_of_error(trace: TracebackType | None) -> list[StackEntry]:
    """Returns the stack at which an exception was raised, the innermost frame last."""
    entries: list[StackEntry] = []
    while trace is not None:
        entries.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return entries


def find_position(stack: Sequence[StackEntry]) -> Position:
    module = _current_module(stack)
    operation = _operation(stack)
    return Position(module, _place(stack, module), operation, _exchange(stack, module) if operation else "")


def format_stack(stack: Iterable[StackEntry]) -> str:
    """Returns the lines of a stack as Python prints them."""
    lines = []
    for frame, number in stack:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {number}, in {code.co_qualname}\n')
        if text := linecache.getline(code.co_filename, number).strip():
            lines.append(f"    {text}\n")
    return "".join(lines)


def _current_module(stack: Sequence[StackEntry]) -> str:
    """Returns the name of the innermost module that is called, as the outermost module on the stack names it."""
    modules: list[Any] = []
    for frame, _ in stack:
        if frame.f_code.co_name == "_call_impl" and _MODULE_CALL.search(frame.f_code.co_filename):
            module = frame.f_locals.get("self")
            modules += [] if module is None or any(module is other for other in modules) else [module]
    while len(modules) > 1 and type(modules[0]).__module__.startswith(_PARALLEL):
        del modules[0]
    if not modules:
        return ""
    names = {id(module): name for name, module in modules[0].named_modules()}
    inner = next((module for module in reversed(modules) if id(module) in names), modules[0])
    name = names[id(inner)].removeprefix("module.").replace("_orig_mod.", "")
    return "" if name in ("module", "_orig_mod") else name


def _operation(stack: Sequence[StackEntry]) -> str:
    """Returns the function of torch.distributed that the thread is in, or `wait` if its innermost line waits."""
    for frame, _ in reversed(stack):
        code = frame.f_code
        file, name = Path(code.co_filename).name, code.co_name
        if file == "distributed_c10d.py" and name != "wrapper" and not name.startswith("_"):
            return name.replace("_", "-")
        if is_user_file(code.co_filename):
            break
    if not stack:
        return ""
    frame, number = stack[-1]
    return "wait" if _WAIT.search(linecache.getline(frame.f_code.co_filename, number)) else ""


def _exchange(stack: Sequence[StackEntry], module: str) -> str:
    """Returns what is exchanged, by the innermost file on the stack that tells it; empty if none does."""
    where = f" of {module}" if module else ""
    has_split_layers = False
    for frame, _ in reversed(stack):
        file = frame.f_code.co_filename
        if _FULLY_SHARD.search(file):
            owner = getattr(frame.f_locals.get("self"), "_module_fqn", None)
            if owner is not None:
                gathers = "unshard" in frame.f_code.co_name
                what = "all-gather of the weights" if gathers else "reduce-scatter of the gradients"
                return f"{what} of {owner or 'the model'}"
        has_split_layers = has_split_layers or "differentiable_collectives" in file
        for pattern, what in _EXCHANGES:
            if pattern.search(file):
                return what + (where if what.endswith(("layer", "BatchNorm")) else "")
        if is_user_file(file):
            break
    return f"exchange of a split layer{where}" if has_split_layers else ""


def _place(stack: Sequence[StackEntry], module: str) -> str:
    """Returns the innermost function of the user's code, or the innermost one if none of it runs, and in whose call it
    is: the data loader, the forward pass of a module, or the backward pass."""
    if not stack:
        return "a place that is not known"
    user = [entry for entry in stack if is_user_file(entry[0].f_code.co_filename)]
    is_loading = any(_LOADER.search(frame.f_code.co_filename) for frame, _ in stack)
    is_backward = any(_BACKWARD.search(frame.f_code.co_filename) for frame, _ in stack)
    context = f", in the forward pass of {module}" if module else ", in the backward pass" if is_backward else ""
    if is_loading:
        called = next(number for number, (frame, _) in enumerate(stack) if _LOADER.search(frame.f_code.co_filename))
        inside = [entry for entry in user if stack.index(entry) > called]
        return f"{_function(*inside[-1])}, called by DataLoader.__next__" if inside else "DataLoader.__next__"
    return _function(*(user or stack)[-1]) + context


def _function(frame: FrameType, number: int) -> str:
    code: CodeType = frame.f_code
    name = code.co_qualname.replace(".<locals>", "")
    name = "the script" if name == "<module>" else name
    return f"{name} ({Path(code.co_filename).name}, line {number})"
