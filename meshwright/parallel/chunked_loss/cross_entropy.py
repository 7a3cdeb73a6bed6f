"""The cross entropy of a linear head's scores, computed for one chunk of tokens after the other, so that the scores of
all tokens never exist together.

With s the label smoothing, w the class weights, t the class of a token and p the softmax of its V scores:

    loss of a token   = -(1 - s) · w_t · log p_t - s / V · Σ_c w_c · log p_c                    _token_losses
    its gradient      = (Σ_c a_c) · p - a,   a_c = (1 - s) · w_t · [c = t] + s / V · w_c        _score_gradient

If the losses are added up, the gradients of hidden states and head are computed in the forward pass, while the scores
of a chunk are there, and only multiplied by the gradient of the sum in the backward pass (`_SumOfLosses`). If the loss
of every token is returned, the backward pass computes the scores again, chunk by chunk (`_LossOfEachToken`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.parallel.torch_private import keeps_graph


@dataclass(frozen=True)
class TokenTargets:
    """The targets of all tokens. `classes` has the class of each token, 0 for ignored tokens. `dtype` is that of the
    products with the head, `wide_dtype` that of the softmax and of sums. `chunks` is the number of chunks."""

    classes: Tensor
    is_valid: Tensor
    class_weight: Tensor | None
    smoothing: float
    dtype: torch.dtype
    wide_dtype: torch.dtype
    chunks: int

    @property
    def chunk_ranges(self) -> Iterator[tuple[int, int]]:
        """The first token of each chunk and the one behind its last."""
        tokens = len(self.classes)
        size = max(1, -(-tokens // self.chunks))
        return ((begin, min(begin + size, tokens)) for begin in range(0, tokens, size))

    @property
    def weight_of_tokens(self) -> Tensor:
        """The class weight of each token's target, or 1; 0 for ignored tokens."""
        if self.class_weight is None:
            return self.is_valid.to(self.wide_dtype)
        return torch.where(self.is_valid, self.class_weight.to(self.wide_dtype)[self.classes], 0)


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: TokenTargets, reduction: str
) -> Tensor:
    """Returns the cross entropy of the scores `hidden @ weight.T + bias`, reduced as `F.cross_entropy` does. `hidden`
    has one row for each token."""
    with torch.autocast(hidden.device.type, enabled=False):
        if reduction == "none":
            return _LossOfEachToken.apply(hidden, weight, bias, targets)
        total: Tensor = _SumOfLosses.apply(hidden, weight, bias, targets)
        if reduction == "sum":
            return total
        count = targets.weight_of_tokens.sum()
        return total / torch.where(count == 0, 1, count)  # without valid targets it is 0, and so is its gradient


class _SumOfLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: TokenTargets) -> Tensor:
        gradients = _Gradients(hidden, weight, bias, targets, ctx.needs_input_grad)
        rows, matrix, added = _cast(targets.dtype, hidden, weight, bias)
        total = hidden.new_zeros((), dtype=targets.wide_dtype)
        for begin, end in targets.chunk_ranges:
            log_softmax = _log_softmax(rows[begin:end], matrix, added, targets)
            total += _token_losses(log_softmax, targets, begin, end).sum()
            if gradients.are_needed:
                scores_gradient = _score_gradient(log_softmax, targets, begin, end)
                del log_softmax
                gradients.add(begin, end, rows, matrix, scores_gradient, targets.is_valid[begin:end])
                del scores_gradient  # so that the next chunk can use its memory
        ctx.gradients = gradients.in_own_dtypes()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("differentiated a second time: call backward with retain_graph=True the first time")
        if keeps_graph():
            scaled = [None if gradient is None else gradient * grads[0] for gradient in ctx.gradients]
        else:  # in place, and without a reference to them here, so that they can become the parameters' gradients
            scaled = [None if gradient is None else gradient.mul_(grads[0]) for gradient in ctx.gradients]
            ctx.gradients = None
        return (*scaled, None)


class _LossOfEachToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: TokenTargets) -> Tensor:
        rows, matrix, added = _cast(targets.dtype, hidden, weight, bias)
        losses = hidden.new_empty(len(hidden), dtype=targets.wide_dtype)
        for begin, end in targets.chunk_ranges:
            log_softmax = _log_softmax(rows[begin:end], matrix, added, targets)
            losses[begin:end] = _token_losses(log_softmax, targets, begin, end)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.targets = targets
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (hidden, weight, bias), targets = ctx.saved_tensors, ctx.targets
        gradients = _Gradients(hidden, weight, bias, targets, ctx.needs_input_grad)
        rows, matrix, added = _cast(targets.dtype, hidden, weight, bias)
        factors = torch.where(targets.is_valid, grads[0], 0)
        with torch.autocast(hidden.device.type, enabled=False):
            for begin, end in targets.chunk_ranges:
                log_softmax = _log_softmax(rows[begin:end], matrix, added, targets)
                scores_gradient = _score_gradient(log_softmax, targets, begin, end)
                del log_softmax
                gradients.add(begin, end, rows, matrix, scores_gradient, factors[begin:end])
                del scores_gradient
        return (*gradients.in_own_dtypes(), None)


class _Gradients:
    """The gradients of hidden states, weight and bias, to which the chunks are added; None for those that are not
    needed. Sums over chunks are in the wide dtype."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: TokenTargets,
        needed: tuple[bool, ...],
    ) -> None:
        self._dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        self._wide_dtype = torch.promote_types(targets.wide_dtype, targets.dtype)
        self.are_needed = any(needed)
        self._needs_weight, self._needs_bias = needed[1], needed[2]
        self._hidden = torch.empty_like(hidden) if needed[0] else None
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        if self.are_needed and not len(hidden):  # there is no chunk
            self._weight = torch.zeros_like(weight) if needed[1] else None
            self._bias = torch.zeros_like(bias) if needed[2] and bias is not None else None

    def add(self, begin: int, end: int, rows: Tensor, matrix: Tensor, gradient: Tensor, factors: Tensor) -> None:
        """Adds the chunk of the tokens [begin, end). `gradient` is that of the loss of each token with respect to its
        scores, which counts `factors` times. Tokens are multiplied by them where they have the width of the hidden
        state, which is much smaller than the number of scores."""
        of_tokens = factors.to(matrix.dtype).unsqueeze(1)
        if self._hidden is not None:
            self._hidden[begin:end] = (gradient @ matrix).mul_(of_tokens)
        if self._needs_weight:
            self._weight = self._sum(self._weight, gradient.t(), rows[begin:end] * of_tokens)
        if self._needs_bias:
            self._bias = self._sum(self._bias, gradient.t(), of_tokens)

    def _sum(self, earlier: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
        """Returns `earlier`, if there is one, plus the product."""
        if earlier is None:
            return (left @ right).to(self._wide_dtype)
        if earlier.dtype == left.dtype:
            return earlier.addmm_(left, right)
        return earlier.add_(left @ right)

    def in_own_dtypes(self) -> list[Tensor | None]:
        """The gradients in the dtypes of hidden states, weight and bias."""
        bias = None if self._bias is None else self._bias.reshape(-1)
        gradients = (self._hidden, self._weight, bias)
        return [None if g is None else g.to(dtype) for g, dtype in zip(gradients, self._dtypes, strict=True)]


def _cast(dtype: torch.dtype, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Any]:
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _log_softmax(rows: Tensor, matrix: Tensor, bias: Tensor | None, targets: TokenTargets) -> Tensor:
    """The log softmax of the scores of some tokens."""
    scores = rows @ matrix.t() if bias is None else torch.addmm(bias, rows, matrix.t())
    scores = scores.to(targets.wide_dtype)
    return torch.log_softmax(scores, 1)


def _token_losses(log_softmax: Tensor, targets: TokenTargets, begin: int, end: int) -> Tensor:
    """The loss of each of the tokens [begin, end), 0 for ignored ones."""
    smoothing, class_weight = targets.smoothing, targets.class_weight
    classes, is_valid = targets.classes[begin:end], targets.is_valid[begin:end]
    losses = -log_softmax.gather(1, classes.unsqueeze(1)).squeeze(1)
    if class_weight is not None:
        losses = losses * class_weight.to(losses.dtype)[classes]
    if smoothing:
        of_classes = log_softmax.sum(1) if class_weight is None else log_softmax @ class_weight.to(log_softmax.dtype)
        losses = (1 - smoothing) * losses - smoothing / log_softmax.shape[1] * of_classes
    return torch.where(is_valid, losses, 0)


def _score_gradient(log_softmax: Tensor, targets: TokenTargets, begin: int, end: int) -> Tensor:
    """The gradient of each token's loss with respect to its scores, also for ignored tokens, in the dtype of products.
    Overwrites `log_softmax`."""
    smoothing, class_weight = targets.smoothing, targets.class_weight
    classes, count = targets.classes[begin:end].unsqueeze(1), log_softmax.shape[1]
    gradient = log_softmax.exp_()
    at_target: Tensor | float = 1 - smoothing
    if class_weight is not None:
        of_classes = class_weight.to(gradient.dtype)
        at_target = at_target * of_classes[classes]
        gradient.mul_(at_target + smoothing / count * of_classes.sum())
        if smoothing:
            gradient.sub_(smoothing / count * of_classes)
    elif smoothing:
        gradient.sub_(smoothing / count)
    return gradient.scatter_(1, classes, gradient.gather(1, classes) - at_target).to(targets.dtype)
