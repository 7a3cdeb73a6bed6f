"""`attention_calls`: the calls of attention in a part of a step, whichever operators a device runs them with.

Most devices run `scaled_dot_product_attention` as one operator. With a mask, a CPU runs two products of matrices with a
softmax between them (torch's `_safe_softmax`, which nothing else calls), and four products for the gradients. Under a
context axis all of them are the same call, with the same exchanges of keys and values. Products and a softmax that a
model's own code writes out are not: there each product gathers what it needs.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from meshwright.profile.values import BatchPolynomial, ModelProfile, Operator, TraceSegment

_SOFTMAX, _SOFTMAX_GRADIENT = "_safe_softmax", "_softmax_backward_data"
_PRODUCT = "bmm"
# FLOPs of an attention operator's gradients, by those of two of the four products.
_GRADIENT_FLOPS = 2.5


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention, which ends after the first `operators_before` operators of its segment.

    `operator` is the call as one operator: a call that ran as products has the FLOPs and the shape that the operator
    would have. `mask_bytes` is the size of a mask that differs from sample to sample, and so is computed from the
    model's inputs, as a function of the batch size; None if there is no such mask or if it is not known.
    """

    segment: TraceSegment
    operators_before: int
    operator: Operator
    mask_bytes: BatchPolynomial | None = None


def attention_calls(profile: ModelProfile) -> list[AttentionCall]:
    """Returns all calls of attention in a step, in the order in which they run."""
    masked_layers = {
        operator.layer for segment in profile.segments for operator in segment.operators if operator.name == _SOFTMAX
    }
    return [call for segment in profile.segments for call in _calls_of_segment(segment, masked_layers)]


def _calls_of_segment(segment: TraceSegment, masked_layers: set[str]) -> Iterator[AttentionCall]:
    operators = segment.operators
    for index, operator in enumerate(operators):
        if operator.kind == "attention":
            yield AttentionCall(segment, index + 1, operator)
        elif operator.layer in masked_layers and operator.name in (_SOFTMAX, _SOFTMAX_GRADIENT):
            scores = _product(reversed(operators[:index]), operator)
            values = _product(operators[index + 1 :], operator)
            # Without products the softmax is computed again, but not the attention: its results were saved.
            if scores is not None and values is not None and _is_of(scores, operator):
                mask = _mask_bytes(operators[index - 1], scores, operator)
                yield AttentionCall(segment, index + 1, _as_attention(scores, values), mask)


def _product(operators: Iterable[Operator], softmax: Operator) -> Operator | None:
    """The first of the operators that is a product in the softmax's layer and pass."""
    return next(
        (
            operator
            for operator in operators
            if operator.name == _PRODUCT
            and operator.layer == softmax.layer
            and operator.computes_gradient == softmax.computes_gradient
        ),
        None,
    )


def _is_of(scores: Operator, softmax: Operator) -> bool:
    """Whether the product has as many results as the softmax has numbers."""
    heads, queries, keys, _ = (size.at(1) for size in scores.shape)
    return heads * queries * keys == softmax.shape[0].at(1)


def _mask_bytes(previous: Operator, scores: Operator, softmax: Operator) -> BatchPolynomial | None:
    """The size of the mask that the operator before the softmax adds to the scores; None if it does not, or if the mask
    is the same for all samples."""
    computed = {use.value for use in scores.writes}
    read = [use for use in previous.reads if use.value not in computed]
    adds_mask = previous.name == "add" and {use.value for use in previous.writes} & {use.value for use in softmax.reads}
    return read[0].bytes if adds_mask and len(read) == 1 and read[0].bytes.linear else None


def _as_attention(scores: Operator, values: Operator) -> Operator:
    """One operator for the products before and after a softmax. The batch of the products is samples × heads."""
    samples_and_heads, queries, keys, width = scores.shape
    flops, one = _sum(scores.flops, values.flops), BatchPolynomial(1.0, 0.0)
    return replace(
        scores,
        kind="attention",
        shape=(samples_and_heads, one, queries, keys, width, BatchPolynomial(0.0, 0.0)),
        flops=flops.scaled(_GRADIENT_FLOPS) if scores.computes_gradient else flops,
        bytes=_sum(scores.bytes, values.bytes),
    )


def _sum(a: BatchPolynomial, b: BatchPolynomial) -> BatchPolynomial:
    return BatchPolynomial(a.constant + b.constant, a.linear + b.linear, a.square + b.square)
