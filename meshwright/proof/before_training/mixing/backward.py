"""Finds backward passes that mix samples, or that are not linear, such as that of a hook which clips. On n data ranks
each rank computes the gradients of n times the loss of its part of a batch, and the ranks take their mean:

    gradient(whole batch, scale) = 1/n · Σ over parts of gradient(part, n · scale)          parts_differ()

This is tried on two parts, with two scales: the smaller one is that of a mean, and the other one shows what changes
large gradients only. A model that returns its loss is tried on the whole batch alone, since this is not known to be a
mean: n times the loss has to have n times the gradients.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from meshwright.user.code import line_of_function, running_line

RunParts = Callable[[], Sequence[tuple[list[Tensor], Sequence[int | None]]]]
"""Runs the model on a whole batch and on its parts. Returns the outputs of each, with their dimensions of samples."""
_SCALES = (1.0, 1024.0)
# An error is relative to the largest gradient of the parameter, or to this part of the model's largest one: some
# gradients are nothing but rounding.
# Sums over samples are rounded otherwise in parts, and norms may compute in fp32 in any case.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
_FLOORS = {torch.float64: 1e-3, torch.float32: 1e-1}


def backward_line(model: nn.Module, run: RunParts, samples: int, dtype: torch.dtype) -> str | None:
    """Returns the line of the hook or of the custom function whose backward pass mixes samples or is not linear; empty
    if the line is not known, and None if there is no such backward pass."""

    def differ(hooks: _Hooks) -> bool:
        outputs = run()
        functions.extend(_custom_function_lines(outputs[0][0]))
        # Without hooks and custom functions, a backward pass is linear.
        scales = _SCALES if hooks.lines or functions else _SCALES[:1]
        return any(parts_differ(model, outputs, scale / samples, dtype) for scale in scales)

    functions: list[str] = []
    with _Hooks() as hooks:
        if not differ(hooks):
            return None
    for line in dict.fromkeys(hooks.lines):
        with _Hooks(without=line) as others:
            if not differ(others):
                return line
    return next(iter(functions or hooks.lines), "")


def parts_differ(
    model: nn.Module,
    outputs: Sequence[tuple[list[Tensor], Sequence[int | None]]],
    scale: float,
    dtype: torch.dtype,
) -> bool:
    """Whether the gradients of the parameters for the whole batch, which is the first of the outputs, are not the mean
    of those for the parts."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count = len(outputs) - 1
    has_samples = any(dim is not None for dim in outputs[0][1])
    whole = _gradients(parameters, *outputs[0], scale)
    if has_samples:
        parts = [_gradients(parameters, *output, scale * count) for output in outputs[1:]]
    else:
        parts = [[gradient / count for gradient in _gradients(parameters, *outputs[0], scale * count)]]
    largest = max((float(value.abs().max()) for value in whole if value.numel()), default=0.0)
    for expected, *found in zip(whole, *parts, strict=True):
        mean = torch.stack(found).mean(0)
        size = float(expected.abs().max()) if expected.numel() else 0.0
        limit = _TOLERANCES[dtype] * (size + _FLOORS[dtype] * largest)
        if not bool(((expected - mean).abs() <= limit).all()):
            return True
    return False


def _gradients(
    parameters: Sequence[nn.Parameter], leaves: list[Tensor], dims: Sequence[int | None], scale: float
) -> Sequence[Tensor]:
    """The gradients of the parameters for a loss of these outputs that is a sum over samples, or, if none of them has
    samples, for the sum of their numbers."""
    terms = [_sum_over_samples(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True) if dim is not None]
    terms = terms or [leaf.sum() for leaf in leaves if not leaf.is_complex()]
    terms = [term for term in terms if term.requires_grad]
    if not terms:
        return [torch.zeros_like(parameter) for parameter in parameters]
    total = sum(terms[1:], terms[0]) * scale
    return torch.autograd.grad(total, parameters, retain_graph=True, materialize_grads=True)


def _sum_over_samples(leaf: Tensor, dim: int) -> Tensor:
    """A sum over an output whose gradient differs from sample to sample and from feature to feature."""
    value = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    value = value.nan_to_num(0, 0, 0)
    factors = torch.ones((), dtype=value.dtype, device=value.device)
    for other, size in enumerate(value.shape):
        if other != dim:
            shape = [size if number == other else 1 for number in range(value.dim())]
            index = torch.arange(size, dtype=value.dtype, device=value.device)
            factors = factors * (1.5 + (0.7 * index + other).cos()).view(shape)
    return (factors * (value + 0.1 * value.square())).sum()


def _custom_function_lines(leaves: Sequence[Tensor]) -> list[str]:
    """The lines of the backward passes of custom functions from which these tensors were computed."""
    nodes = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
    seen, lines = set(nodes), dict[str, None]()
    while nodes:
        node = nodes.pop()
        function = getattr(getattr(type(node), "_forward_cls", None), "backward", None)
        if line := line_of_function(function):
            lines[line] = None
        for earlier, _ in node.next_functions:
            if earlier is not None and earlier not in seen:
                seen.add(earlier)
                nodes.append(earlier)
    return list(lines)


class _Hooks(TorchFunctionMode):
    """Collects the lines that register hooks of tensors. Those of the line `without` are not registered."""

    def __init__(self, without: str | None = None) -> None:
        super().__init__()
        self._without = without
        self.lines: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.register_hook:
            self.lines.append(running_line())
            if self.lines[-1] == self._without:
                return RemovableHandle(OrderedDict())
        return func(*args, **(kwargs or {}))
