"""Finds the line of a model's code that mixes samples: the first operator whose result for a sample differs between two
batches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.proof.before_training.mixing.rows import Pairs, by_sample, sample_dims
from meshwright.proof.torch_private import tree_leaves
from meshwright.user.code import running_line


def locate(
    model: nn.Module, run: Callable[[bool], Any], pairs: Pairs, sizes: tuple[int, int], tolerance: float
) -> tuple[str, str] | None:
    """Returns the name of the module and the line that mix samples first; None if they are not found. `run` runs the
    model on the first batch, and on the other one if it is called with True."""
    stack: list[str] = []
    shapes = _Recorder(stack, lambda number, value: tuple(value.shape))
    with _module_stack(model, stack), shapes:
        run(False)
    dims: list[int | None] = []

    def of_other(number: int, value: Tensor) -> Any:
        before = shapes.records[number] if number < len(shapes.records) else ()
        grown = sample_dims(torch.empty(before, device="meta"), value, sizes) if len(before) == value.dim() else []
        dims.append(grown[0] if len(grown) == 1 else None)
        return _fingerprints(value, dims[-1], sizes[1])

    other = _Recorder(stack, of_other)
    with _module_stack(model, stack), other:
        run(True)
    first = _Recorder(
        stack, lambda number, value: _fingerprints(value, dims[number] if number < len(dims) else None, sizes[0])
    )
    with _module_stack(model, stack), first:
        run(False)
    for number, (a, b) in enumerate(zip(first.records, other.records, strict=False)):
        if first.places[number] != other.places[number]:
            return None  # the code goes another way for the other batch
        if a and b and not any(_same(x, y, pairs, tolerance) for x, y in zip(a, b, strict=True)):
            return first.places[number]
    return None


class _Recorder(TorchFunctionMode):
    """Records something of each real tensor that an operator returns or writes to, and the module and line that called
    the operator."""

    def __init__(self, stack: list[str], record: Callable[[int, Tensor], Any]) -> None:
        super().__init__()
        self._stack = stack
        self._record = record
        self.records: list[Any] = []
        self.places: list[tuple[str, str]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        written = args[:1] if result is None else result
        values = [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if values:
            place = (self._stack[-1] if self._stack else "", running_line())
            with torch.no_grad():
                for value in values:
                    self.records.append(self._record(len(self.records), value.detach()))
                    self.places.append(place)
        return result


def _fingerprints(value: Tensor, dim: int | None, samples: int) -> list[Tensor]:
    """Returns two numbers for each sample, for each reading of a tensor: a sum with different factors, and one without
    signs, which is the scale of the first. Empty for a tensor without samples."""
    if dim is None:
        return []
    prints = []
    for reading in by_sample(value, dim, samples):
        rows = reading.flatten(1).double() if reading.dim() > 1 else reading[:, None].double()
        factors = torch.arange(1, rows.shape[1] + 1, device=rows.device, dtype=torch.float64).mul(0.7).cos()
        prints.append(torch.stack([rows @ factors, rows.abs().sum(1)], 1))
    return prints


def _same(first: Tensor, second: Tensor, pairs: Pairs, tolerance: float) -> bool:
    a, b = first[[row for row, _ in pairs]], second[[row for _, row in pairs]]
    limit = tolerance * torch.maximum(a[:, 1].max(), b[:, 1].max())
    apart = (a - b).abs() <= limit
    return bool((apart | (a.isnan() & b.isnan())).all())


@contextmanager
def _module_stack(model: nn.Module, stack: list[str]) -> Iterator[None]:
    """Within this context, `stack` has the names of the modules that run, the innermost one last."""
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
        handles.append(module.register_forward_hook(lambda *_: (stack.pop(), None)[1], always_call=True))
    try:
        yield
    finally:
        stack.clear()
        for handle in handles:
            handle.remove()
