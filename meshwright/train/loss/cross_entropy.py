"""Counts the targets that torch's cross entropies are means over.

A user's loss function, and the loss inside a model (every loss of the transformers library), mostly end in
`torch.nn.functional.cross_entropy` or `nll_loss`, whose mean is over the targets that are not ignored. The number of
these targets is known only there: the model may have shifted the labels, or replaced some of them.

If all targets are ignored, the mean is 0/0. Where targets are counted it is 0, so that a rank without any target
contributes nothing.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.profile.torch_private import FakeTensor

Count = Tensor | float
_PARAMETERS = {name: tuple(inspect.signature(getattr(F, name)).parameters) for name in ("cross_entropy", "nll_loss")}
_DEFAULTS = {
    "reduction": "mean",
    "reduce": None,
    "size_average": None,
    "ignore_index": -100,
    "weight": None,
}


@dataclass(frozen=True)
class CountedMean:
    """What losses return that are found to be means over targets: the `mean`, which is 0 if there are no targets, and
    their `number`."""

    mean: Tensor
    number: Count

    @property
    def total(self) -> Tensor:
        """The sum over the targets."""
        return self.mean * self.number


def count_targets(target: Tensor, ignore_index: int, class_weight: Tensor | None) -> Count:
    """Returns what the mean of a cross entropy is divided by: the number of targets that are not ignored, or the sum of
    their class weights."""
    if target.is_floating_point():  # class probabilities: nothing is ignored
        return float(target.numel() / target.shape[-1 if target.dim() == 1 else 1])
    valid = target != ignore_index
    if class_weight is None:
        return valid.sum()
    return class_weight.to(target.device)[target[valid]].sum()


class CountTargets(TorchFunctionMode):
    """Within this context, the targets of cross entropies are counted, however these functions were imported. The count
    of each call is added to `counts`."""

    def __init__(self, counts: list[Count]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _PARAMETERS and func is getattr(F, name):
            return _call_and_count(name, func, self._counts, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class FindIgnoredTargets(TorchFunctionMode):
    """Within this context, `flags` gets a tensor for each cross entropy that is a mean over classes: whether it ignores
    one of its targets. It gets none where no value can be read (`_has_no_value`)."""

    def __init__(self) -> None:
        super().__init__()
        self.flags: list[Tensor] = []

    @property
    def ignores(self) -> bool:
        """Whether a target is ignored. Waits for the device."""
        return any(map(bool, self.flags))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _PARAMETERS and func is getattr(F, name):
            options = _options(name, args, kwargs or {})
            target = options["target"]
            if options["reduction"] == "mean" and not target.is_floating_point() and not _has_no_value(target):
                self.flags.append((target == options["ignore_index"]).any())
        return func(*args, **(kwargs or {}))


def _has_no_value(tensor: Tensor) -> bool:
    """Whether no value can be read: of a fake tensor, and while a CUDA graph is recorded."""
    return isinstance(tensor, FakeTensor) or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


class CountTargetsInModules:
    """Like `CountTargets`, but only for calls through the module `torch.nn.functional`. It costs other operators
    nothing, so a whole forward pass can run in it. Code that torch has compiled in it stays valid, because every use of
    this object puts the same functions there. `counts` holds the count of each call so far."""

    def __init__(self) -> None:
        self.counts: list[Count] = []
        self._originals = {name: getattr(F, name) for name in _PARAMETERS}
        self._replacements = {
            name: _counting(name, original, self.counts) for name, original in self._originals.items()
        }

    @contextmanager
    def active(self) -> Iterator[None]:
        """The context in which targets are counted."""
        for name, replacement in self._replacements.items():
            setattr(F, name, replacement)
        try:
            yield
        finally:
            for name, original in self._originals.items():
                setattr(F, name, original)


def _counting(name: str, original: Callable[..., Any], counts: list[Count]) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _call_and_count(name, original, counts, args, kwargs)

    return call


def _call_and_count(name: str, original: Callable[..., Any], counts: list[Count], args: Any, kwargs: Any) -> Any:
    """Calls a cross entropy. If it returns a mean, its count is added to `counts`."""
    options = _options(name, args, kwargs)
    target = options.get("target")
    is_mean = options["reduction"] == "mean" and options["reduce"] is None and options["size_average"] is None
    # A pipeline finds shapes with fake tensors first.
    if not is_mean or not isinstance(target, Tensor) or isinstance(target, FakeTensor):
        return original(*args, **kwargs)
    count = count_targets(target, options["ignore_index"], options["weight"])
    counts.append(count)
    total = original(
        *args[:2], **{**dict(zip(_PARAMETERS[name][2:], args[2:], strict=False)), **kwargs, "reduction": "sum"}
    )
    return total / (torch.where(count == 0, 1, count) if isinstance(count, Tensor) else count or 1.0)


def _options(name: str, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of a cross entropy, by name."""
    return {
        **_DEFAULTS,
        **dict(zip(_PARAMETERS[name], args, strict=False)),
        **kwargs,
    }  # a wrong call is refused by torch
