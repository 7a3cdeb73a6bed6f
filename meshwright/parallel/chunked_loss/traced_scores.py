"""`TracedScores`: what a head returns in place of `LazyScores` in code that torch compiles.

The compiler cannot trace a subclass of tensors that is made within the code, but it traces an ordinary object: its
methods, and torch's functions of it. So head and loss are part of the one graph of the model. What stands in that graph
for the loss is a function that the compiler does not look into; its backend does.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.dtypes import TensorStandIn
from meshwright.parallel.chunked_loss.cross_entropy import TokenTargets, chunked_cross_entropy
from meshwright.parallel.chunked_loss.scores import RULES, LinearHead, Rule


class TracedScores(TensorStandIn):
    """Scores with the classes in dimension `class_dim`, computed from `hidden`, which has the features there. They are
    computed by each function that needs all of them; the compiler computes them once."""

    def __init__(self, hidden: Tensor, class_dim: int, dtype: torch.dtype, head: LinearHead) -> None:
        self.hidden, self.class_dim, self.dtype, self.head = hidden, class_dim, dtype, head

    def with_hidden(
        self, hidden: Tensor, class_dim: int, dtype: torch.dtype, compute: Callable[[], Tensor]
    ) -> "TracedScores":
        return TracedScores(hidden, class_dim, dtype, self.head)

    def compute(self) -> Tensor:
        """Returns the scores as an ordinary tensor."""
        weight, bias, dtype = self.head.weight, self.head.bias, self.head.dtype
        rows = self.hidden.movedim(self.class_dim, -1).to(dtype)
        with torch.autocast(rows.device.type, enabled=False):
            scores = F.linear(rows, weight.to(dtype), None if bias is None else bias.to(dtype))
        return scores.movedim(-1, self.class_dim).to(self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = RULES.get(func)
        if rule is not None and isinstance(args[0] if args else None, TracedScores):
            result = rule(func, args, kwargs or {})
            if result is not NotImplemented:
                return result
        return func(*[_computed(arg) for arg in args], **{name: _computed(arg) for name, arg in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compute(), name)

    @property
    def shape(self) -> torch.Size:
        sizes = list(self.hidden.shape)
        sizes[self.class_dim] = self.head.weight.shape[0]
        return torch.Size(sizes)

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return self.hidden.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.hidden.dim()

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]


def _computed(value: Any) -> Any:
    if isinstance(value, TracedScores):
        return value.compute()
    return type(value)([_computed(entry) for entry in value]) if type(value) in (list, tuple) else value


def _method(func: Any, rule: Rule) -> Callable[..., Any]:
    def call(self: TracedScores, *args: Any, **kwargs: Any) -> Any:
        result = rule(func, (self, *args), kwargs)
        return func(self.compute(), *args, **kwargs) if result is NotImplemented else result

    return call


def _operator(func: Any) -> Callable[..., Any]:
    def call(self: TracedScores, *args: Any) -> Any:
        return func(self.compute(), *[_computed(arg) for arg in args])

    return call


_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg", "matmul"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
)
for _func, _rule in RULES.items():
    _name = str(getattr(_func, "__name__", ""))
    if getattr(Tensor, _name, None) is _func:
        setattr(TracedScores, _name, _method(_func, _rule))
for _name in _OPERATORS:
    setattr(TracedScores, f"__{_name}__", _operator(getattr(Tensor, f"__{_name}__")))


def traced_scores(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, loss_in_chunks: Callable[..., Tensor]
) -> TracedScores:
    """Returns the scores that a linear head with this weight and bias computes from hidden states. `loss_in_chunks` is
    what `opaque_loss` returned."""
    device = hidden.device.type
    casts = torch.is_autocast_enabled(device) and weight.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if casts else weight.dtype
    return TracedScores(hidden, hidden.dim() - 1, dtype, LinearHead(weight, bias, dtype, chunks, [], loss_in_chunks))


def opaque_loss() -> Callable[..., Tensor]:
    """Returns the loss as a function that the compiler puts into its graph without looking into it."""

    def loss_in_chunks(
        rows: Tensor, weight: Tensor, bias: Tensor | None, targets: tuple[Any, ...], reduction: str
    ) -> Tensor:
        return chunked_cross_entropy(rows, weight, bias, TokenTargets(*targets), reduction)

    allowed: Callable[..., Tensor] = torch.compiler.allow_in_graph(loss_in_chunks)
    return allowed
