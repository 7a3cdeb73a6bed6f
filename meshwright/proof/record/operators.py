"""`OperatorRecorder`: records what the operators that a model calls itself take and return, by the line that calls
them. Ranks record the part of each tensor that they hold, one device records whole tensors, and `compare/operators.py`
compares them."""

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.files.pt_file import read_pt_file
from meshwright.parallel.differentiable_collectives import IndexRanges
from meshwright.parallel.tensor.shard_view import ShardView
from meshwright.proof.reference import lift_casts
from meshwright.proof.torch_private import in_backward, tree_leaves
from meshwright.user.code import is_machinery

COMPARED_DTYPES = (torch.float64, torch.float32, torch.complex128, torch.complex64)
# Of what one rank records. What comes later is left out.
_MOST_BYTES = 2**28
_MOST_TENSORS = 20_000
# Files whose functions hand themselves, or others, over to a mode: the line that called them is looked for above them.
_TORCH_FILES = ("functional.py", "_tensor.py", "nn/functional.py", "overrides.py")
_CALLED_THROUGH = (lift_casts.__file__, *(str(Path(torch.__file__).parent / file) for file in _TORCH_FILES))

# The line as `FILE, line N`, the function, the innermost module that ran, and how often they were called before. The
# module's name is empty for the whole model, and outside of it.
Place = tuple[str, str, str, int]


@dataclass(frozen=True)
class PartOfTensor:
    """What a rank holds of a tensor. `divisions` are dimensions with the index ranges that it holds of them, the
    outermost division first."""

    value: Tensor
    divisions: tuple[tuple[int, IndexRanges], ...] = ()


@dataclass(frozen=True)
class OperatorCall:
    """One call of a function, with the tensors that it took and returned."""

    place: Place
    arguments: tuple[PartOfTensor | None, ...]
    results: tuple[PartOfTensor | None, ...]


class OperatorRecorder(TorchFunctionMode):
    """While it is active, appends the calls of a forward pass to `calls`, in their order. Modules are named as in
    `model`; if that is None, as in the outermost module that runs."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.calls: list[OperatorCall] = []
        self._numbers: Counter[tuple[str, str, str]] = Counter()
        self._modules: list[nn.Module] = []  # those that run, the innermost last
        self._model = model
        self._names: dict[nn.Module, str] = {}
        self._bytes, self._tensors = 0, 0

    def __enter__(self) -> "OperatorRecorder":
        register = torch.nn.modules.module
        self._hooks = (
            register.register_module_forward_pre_hook(self._enter_module),
            register.register_module_forward_hook(self._leave_module, always_call=True),
        )
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _enter_module(self, module: nn.Module, arguments: Any) -> None:
        if not self._modules:
            self._names = {inner: name for name, inner in (self._model or module).named_modules()}
        self._modules.append(module)

    def _leave_module(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._modules:
            self._modules.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_full = self._bytes > _MOST_BYTES or self._tensors > _MOST_TENSORS
        line = None if is_full or in_backward() else _calling_line()
        if line is None:
            return func(*args, **(kwargs or {}))
        arguments = self._parts((args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = str(getattr(func, "__name__", func))
        results = self._parts(args[:1] if result is None else result)
        if any(part is not None for part in results):
            called = (line, name, self._names.get(self._modules[-1], "") if self._modules else "")
            self.calls.append(OperatorCall((*called, self._numbers[called]), arguments, results))
            self._numbers[called] += 1
        return result

    def _parts(self, values: Any) -> tuple[PartOfTensor | None, ...]:
        leaves = tree_leaves(values, is_leaf=lambda leaf: isinstance(leaf, Tensor))
        parts = tuple(_part_of(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        self._bytes += sum(part.value.nbytes for part in parts if part is not None)
        self._tensors += len(parts)
        return parts


def _part_of(tensor: Tensor) -> PartOfTensor | None:
    """Returns a copy of what this rank holds of a tensor. Returns None for parameters, for tensors whose parts are not
    known, and for other types than `COMPARED_DTYPES`: the indices of a sort may differ where values are equal."""
    divisions: list[tuple[int, IndexRanges]] = []
    while isinstance(tensor, ShardView):
        if tensor.spec.samples_by_rank:
            return None
        ranges = tensor.spec.ranges
        divisions.append((ranges.dim, ranges.by_rank[tensor.spec.group.rank]))
        tensor = tensor.local_tensor
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta:
        return None
    if tensor.dtype not in COMPARED_DTYPES:
        return None
    return PartOfTensor(tensor.detach().resolve_conj().resolve_neg().cpu().clone(), tuple(divisions))


def _calling_line() -> str | None:
    """Returns the line that calls the function which is handed over to the mode. Returns None if it is one of torch's
    modules, or of this package."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename in _CALLED_THROUGH and frame.f_back is not None:
        frame = frame.f_back
    file = frame.f_code.co_filename
    return None if is_machinery(file) else sys.intern(f"{file}, line {frame.f_lineno}")


def write_calls(recorder: OperatorRecorder, file: Path) -> None:
    """Writes what a rank has recorded."""
    torch.save([_to_plain(call) for call in recorder.calls], file)


def read_calls(file: Path) -> list[OperatorCall]:
    """Returns what `write_calls` wrote to the file."""
    return [_from_plain(values) for values in read_pt_file(file)]


def _to_plain(call: OperatorCall) -> tuple[Any, ...]:
    sides = [[part and (part.value, part.divisions) for part in side] for side in (call.arguments, call.results)]
    return (call.place, *sides)


def _from_plain(values: tuple[Any, ...]) -> OperatorCall:
    place, *sides = values
    arguments, results = (tuple(PartOfTensor(*part) if part else None for part in side) for side in sides)
    return OperatorCall(place, arguments, results)
