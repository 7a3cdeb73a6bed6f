"""`LazyScores`: the scores of a linear head, which are not computed until something needs them.

A model's code and a loss function see a tensor of the scores' shape. What they usually do between the head and the
cross entropy (casts to a wider dtype, reshaping, slices of the sequence, transposing) gives other lazy scores: the same
is done to the hidden states, whose features are in the place of the classes. `F.cross_entropy` is then computed chunk
by chunk (cross_entropy.py). Any other function computes all scores, once, and every later use gets these.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.parallel.chunked_loss.cross_entropy import TokenTargets, chunked_cross_entropy
from meshwright.parallel.torch_private import DisableTorchFunctionSubclass, make_wrapper_subclass, tree_map, uncompiled

# Of `F.cross_entropy`, with their defaults.
_OPTIONS = {name: option.default for name, option in inspect.signature(F.cross_entropy).parameters.items()}
_WIDE = (torch.float32, torch.float64)


@dataclass
class LinearHead:
    """The head whose scores are lazy. `dtype` is that of its products, `chunks` the number of chunks of a loss. `hooks`
    are called when the gradient of the scores arrives. `loss_in_chunks` computes the loss, given the fields of the
    targets, where it is not `chunked_cross_entropy`. `are_computed` says whether something needed all scores."""

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    chunks: int
    hooks: list[Callable[[Tensor], Any]]
    loss_in_chunks: Callable[..., Tensor] | None = None
    are_computed: bool = False


class LazyScores(Tensor):
    """Scores with the classes in dimension `class_dim`, computed from `hidden`, which has the features there."""

    hidden: Tensor
    class_dim: int
    head: LinearHead
    _compute: Callable[[], Tensor]
    _scores: Tensor | None
    run: ClassVar[Callable[..., Any]]  # runs a torch function that is given lazy scores

    @staticmethod
    def __new__(
        cls: type["LazyScores"],
        hidden: Tensor,
        class_dim: int,
        dtype: torch.dtype,
        head: LinearHead,
        compute: Callable[[], Tensor],
    ) -> "LazyScores":
        shape = list(hidden.shape)
        shape[class_dim] = len(head.weight)
        scores: LazyScores = make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        scores.hidden, scores.class_dim, scores.head, scores._compute = hidden, class_dim, head, compute
        scores._scores = None
        return scores

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls.run(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(_computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    def with_hidden(self, hidden: Tensor, class_dim: int, dtype: torch.dtype, compute: Callable[[], Tensor]) -> Tensor:
        """Returns lazy scores of the same head and of other hidden states. `compute` computes all of them."""
        return _connected(hidden, class_dim, dtype, self.head, compute)

    def compute(self) -> Tensor:
        """Returns the scores as an ordinary tensor, always the same one."""
        if self._scores is None:
            self.head.are_computed = True
            with torch.enable_grad():  # the first use may be one without gradients
                self._scores = self._compute()
        return self._scores

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyScores({tuple(self.shape)}, dtype={self.dtype}, chunks={self.head.chunks})"


def lazy_scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunks: int) -> Tensor:
    """Returns the scores that a linear head with this weight and bias computes from hidden states."""
    device = hidden.device.type
    casts = torch.is_autocast_enabled(device) and weight.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if casts else weight.dtype
    head = LinearHead(weight, bias, dtype, chunks, [])

    def compute() -> Tensor:
        with torch.autocast(device, enabled=False):
            scores = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        for hook in head.hooks:
            scores.register_hook(hook)
        return scores

    return _connected(hidden, hidden.dim() - 1, dtype, head, compute)


def run_uncompiled() -> None:
    """Makes functions of lazy scores run as they are within compiled functions. The compiler would compile each part of
    these functions by itself."""
    LazyScores.run = staticmethod(uncompiled(_run))


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = args[0] if args else kwargs.get("input")
    wrapped = getattr(func, "__wrapped__", None)
    func = wrapped if wrapped in RULES else func  # cross entropies whose targets are counted (train/loss)
    if isinstance(first, LazyScores):
        if _describes(func):
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        rule = RULES.get(func)
        result = NotImplemented if rule is None or first.head.are_computed else rule(func, args, kwargs)
        if result is not NotImplemented:
            return result
    args, kwargs = tree_map(_computed, (args, kwargs))
    return func(*args, **kwargs)


LazyScores.run = staticmethod(_run)


def _computed(value: Any) -> Any:
    return value.compute() if isinstance(value, LazyScores) else value


def _describes(func: Any) -> bool:
    """Whether a function of a tensor only says something about it, without its values: its shape, dtype, device."""
    is_attribute = getattr(func, "__name__", "") == "__get__"
    return func.__self__.__name__ in _ATTRIBUTES if is_attribute else func in _QUERIES


_ATTRIBUTES = {
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "names", "_base", "output_nr"),
}
_QUERIES = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.element_size, torch.numel),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, Tensor.__len__),
    *(Tensor.get_device, Tensor.__hash__, Tensor.__repr__, Tensor.is_contiguous),
}


# ---- gradients


class _Connected(torch.autograd.Function):
    """Lazy scores as a result that autograd knows: code that looks at the graph (DDP looks for parameters that a step
    does not use) finds hidden states and head, and a gradient of the scores, which only code gives them that avoids
    `__torch_function__`, reaches both."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, make: Callable[[Tensor], LazyScores]
    ) -> Tensor:
        scores = make(hidden)
        ctx.save_for_backward(hidden, weight)
        ctx.class_dim, ctx.dtype = scores.class_dim, scores.head.dtype
        return scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        gradient = grads[0].movedim(ctx.class_dim, -1).to(ctx.dtype)
        rows = hidden.movedim(ctx.class_dim, -1).to(ctx.dtype)
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_hidden = (gradient @ weight.to(ctx.dtype)).movedim(-1, ctx.class_dim).to(hidden.dtype)
        of_weight = (flat.t() @ rows.reshape(-1, rows.shape[-1])).to(weight.dtype)
        return of_hidden, of_weight, flat.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None, None


def _connected(
    hidden: Tensor, class_dim: int, dtype: torch.dtype, head: LinearHead, compute: Callable[[], Tensor]
) -> Tensor:
    def make(_: Tensor) -> LazyScores:
        return LazyScores(hidden, class_dim, dtype, head, compute)

    scores: Tensor = _Connected.apply(hidden, head.weight, head.bias, make)
    return scores


# ---- functions that leave the scores lazy. A rule returns NotImplemented where all scores are needed.


def _derived(scores: LazyScores, func: Any, args: Any, kwargs: Any, hidden: Tensor, class_dim: int) -> Any:
    """Lazy scores that `func` makes of others, whose values do not change."""
    return scores.with_hidden(hidden, class_dim, scores.dtype, lambda: func(scores.compute(), *args[1:], **kwargs))


def _cast(func: Any, args: Any, kwargs: Any) -> Any:
    scores = args[0]
    options = (*args[1:], *kwargs.values())
    if func is Tensor.to and not all(isinstance(option, torch.dtype) for option in options):
        return NotImplemented
    dtype = {Tensor.float: torch.float32, Tensor.double: torch.float64}.get(func) or options[0]
    if dtype == scores.dtype:
        return scores
    rounds_again = scores.dtype != scores.head.dtype and torch.promote_types(dtype, scores.dtype) != dtype
    if dtype not in _WIDE or rounds_again:
        return NotImplemented
    return scores.with_hidden(scores.hidden, scores.class_dim, dtype, lambda: scores.compute().to(dtype))


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    scores = args[0]
    return _derived(scores, func, args, kwargs, scores.hidden, scores.class_dim)


def _reshape(func: Any, args: Any, kwargs: Any) -> Any:
    """Functions that change the shape and keep the order of the elements. The classes must stay one dimension."""
    scores, dim = args[0], args[0].class_dim
    old = tuple(scores.shape)
    new = tuple(func(torch.empty(old, device="meta"), *args[1:], **kwargs).shape)
    for place, size in enumerate(new):
        if size == old[dim] and prod(new[:place]) == prod(old[:dim]) and prod(new[place + 1 :]) == prod(old[dim + 1 :]):
            hidden = scores.hidden.reshape(*new[:place], scores.hidden.shape[dim], *new[place + 1 :])
            return _derived(scores, func, args, kwargs, hidden, place)
    return NotImplemented


def _permute(func: Any, args: Any, kwargs: Any) -> Any:
    """Functions that change the order of the dimensions."""
    scores = args[0]
    sizes = [2 if dim == scores.class_dim else 1 for dim in range(scores.dim())]
    class_dim = tuple(func(torch.empty(sizes, device="meta"), *args[1:], **kwargs).shape).index(2)
    return _derived(scores, func, args, kwargs, func(scores.hidden, *args[1:], **kwargs), class_dim)


def _narrow(func: Any, args: Any, kwargs: Any) -> Any:
    scores = args[0]
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    if dim % scores.dim() == scores.class_dim:
        return NotImplemented
    return _derived(scores, func, args, kwargs, func(scores.hidden, *args[1:], **kwargs), scores.class_dim)


def _index(func: Any, args: Any, kwargs: Any) -> Any:
    """Numbers and slices of other dimensions than the classes, or one tensor that picks tokens."""
    scores, index = args
    dims = scores.dim()
    if isinstance(index, Tensor):
        picked = index.dim() if index.dtype == torch.bool else 1
        if scores.class_dim != dims - 1 or picked >= dims or isinstance(index, LazyScores):
            return NotImplemented
        hidden = scores.hidden[index]
        return _derived(scores, func, args, kwargs, hidden, hidden.dim() - 1)
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(entry is Ellipsis or type(entry) in (int, slice) for entry in entries) or entries.count(Ellipsis) > 1:
        return NotImplemented
    place = entries.index(Ellipsis) if Ellipsis in entries else len(entries)
    before, after = entries[:place], entries[place + 1 :]
    entries = [*before, *[slice(None)] * (dims - len(before) - len(after)), *after]
    if len(entries) != dims or entries[scores.class_dim] != slice(None):
        return NotImplemented
    class_dim = scores.class_dim - sum(type(entry) is int for entry in entries[: scores.class_dim])
    return _derived(scores, func, args, kwargs, scores.hidden[tuple(entries)], class_dim)


def _cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    options = {**_OPTIONS, **dict(zip(_OPTIONS, args, strict=False)), **kwargs}
    scores, target, class_weight, reduction = (options[name] for name in ("input", "target", "weight", "reduction"))
    expected = tuple(size for dim, size in enumerate(scores.shape) if dim != scores.class_dim)
    is_chunkable = (
        scores.class_dim == (1 if scores.dim() > 1 else 0)
        and type(target) is Tensor
        and not target.is_floating_point()
        and tuple(target.shape) == expected
        and type(class_weight) in (type(None), Tensor)
        and reduction in ("mean", "sum", "none")
        and options["size_average"] is None
        and options["reduce"] is None
    )
    if not is_chunkable:
        return NotImplemented
    hidden = scores.hidden.movedim(scores.class_dim, -1)
    classes = target.reshape(-1)
    is_valid = classes != options["ignore_index"]
    head = scores.head
    targets = (
        torch.where(is_valid, classes, 0),
        is_valid,
        class_weight,
        options["label_smoothing"],
        head.dtype,
        torch.promote_types(scores.dtype, torch.float32),
        head.chunks,
    )
    rows = hidden.reshape(-1, hidden.shape[-1])
    if head.loss_in_chunks is None:
        loss = chunked_cross_entropy(rows, head.weight, head.bias, TokenTargets(*targets), reduction)
    else:
        loss = head.loss_in_chunks(rows, head.weight, head.bias, targets, reduction)
    in_autocast = torch.is_autocast_enabled(scores.device.type)  # where F.cross_entropy returns fp32
    loss = loss if in_autocast else loss.to(scores.dtype)
    return loss.reshape(expected) if reduction == "none" else loss


def _register_hook(func: Any, args: Any, kwargs: Any) -> Any:
    """A hook that does not look at the gradient is called with that of the hidden states, too."""
    scores, hook = args
    if not getattr(hook, "ignores_gradient", False):
        return NotImplemented
    scores.head.hooks.append(hook)
    return scores.hidden.register_hook(hook)


Rule = Callable[[Any, Any, Any], Any]
RULES: dict[Any, Rule] = {
    **dict.fromkeys((Tensor.float, Tensor.double, Tensor.to), _cast),
    **dict.fromkeys((Tensor.contiguous, Tensor.clone, torch.clone), _copy),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten), _reshape),
    **dict.fromkeys((Tensor.squeeze, torch.squeeze, Tensor.unsqueeze, torch.unsqueeze), _reshape),
    **dict.fromkeys((Tensor.transpose, torch.transpose, Tensor.permute, torch.permute), _permute),
    **dict.fromkeys((Tensor.movedim, torch.movedim, Tensor.swapaxes, torch.swapaxes), _permute),
    **dict.fromkeys((Tensor.narrow, torch.narrow), _narrow),
    Tensor.__getitem__: _index,
    F.cross_entropy: _cross_entropy,
    Tensor.register_hook: _register_hook,
}
