"""The operators of a rank under `numerics.precision: fp8`: matrix products of linear layers in 8 bits, and the casts of
their operands.

A product of (m, k) and (k, n) numbers that were 16 bits long reads one byte of each and writes two bytes of the result,
at the device's fp8 rate. Before it, its operands are cast (`Float8Casts`):

    ours      x and W before y = x Wᵀ; g and W before the gradient of x; x once more before that of W. Each is read for
              its scale, and read again to be written in 8 bits: 2 + 2 + 1 bytes a number (torchao, a scale a tensor)

Other operators are those of bf16: attention, norms, the head if its weight is tied, and layers whose sizes are no
multiples of 16. Saved tensors stay in bf16, so a plan's memory is that of bf16.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshwright.blocks.operator_kinds import OperatorKind
from meshwright.profile.values import BatchPolynomial, ModelProfile, Operator, TraceSegment

_SIZE_MULTIPLE = 16  # the fp8 instructions want both sizes of a layer to be multiples of this (parallel/float8.py)
_FLOAT8 = "float8_e4m3fn"
_RESULT_BYTES = 2


@dataclass(frozen=True)
class Float8Casts:
    """How a program casts the operands of products to 8 bits. `scale_bytes` and `cast_bytes` are moved for each number,
    by the kernel that finds the scale (0 if the same kernel does both) and by the one that casts. With `weights`,
    weights are cast before each product, otherwise they are kept in 8 bits. With `again`, the input is cast once more
    in the backward pass."""

    scale_bytes: float = 2.0
    cast_bytes: float = 3.0
    weights: bool = True
    again: bool = True


OUR_CASTS = Float8Casts()


def linear_layers(profile: ModelProfile) -> frozenset[str]:
    """The names of the layers whose products run in 8 bits: those of a two-dimensional weight that is used under one
    name, of sizes that the instructions can multiply."""
    return frozenset(
        parameter.names[0].removesuffix(".weight")
        for parameter in profile.parameters
        if len(parameter.names) == 1
        and len(parameter.shape) == 2
        and all(size % _SIZE_MULTIPLE == 0 for size in parameter.shape)
    )


def float8_profile(profile: ModelProfile, layers: frozenset[str], casts: Float8Casts = OUR_CASTS) -> ModelProfile:
    """The profile of a rank with the products of these layers in 8 bits. It is meant for predicting time."""

    def converted(segment: TraceSegment) -> Iterable[Operator]:
        for operator in segment.operators:
            if operator.kind == "matmul" and operator.layer in layers and operator.flops.at(1):
                yield from _casts(operator, casts)
                yield _product(operator)
            else:
                yield operator

    segments = tuple(replace(segment, operators=tuple(converted(segment))) for segment in profile.segments)
    return replace(profile, segments=segments)


def _product(operator: Operator) -> Operator:
    """The product in 8 bits. Of a grouped product, the weights of all groups are read, of which its shape has one."""
    count, m, n, _ = operator.shape
    written = _times(_times(count, m), n).scaled(_RESULT_BYTES)
    before = operator.bytes
    read = [
        max(0.0, getattr(before, part) - getattr(written, part)) / 2 + getattr(written, part)
        for part in ("constant", "linear", "square")
    ]
    return replace(operator, dtype=_FLOAT8, bytes=BatchPolynomial(*read))


def _casts(operator: Operator, casts: Float8Casts) -> list[Operator]:
    """The casts before one product. The right operand of a product with a weight is the weight; a product that sums
    over the samples makes the gradient of a weight, whose left operand was cast for the gradient of the input."""
    count, m, n, k = operator.shape
    left, right = _times(_times(count, m), k), _times(_times(count, k), n)
    weight_gradient, others = ([right] if casts.again else []), ([left, right] if casts.weights else [left])
    tensors = weight_gradient if k.linear else others
    kernels: tuple[tuple[str, OperatorKind, float], ...] = (
        ("float8_scale", "reduction", casts.scale_bytes),
        ("float8_cast", "elementwise", casts.cast_bytes),
    )
    return [
        Operator(operator.layer, name, kind, "bfloat16", BatchPolynomial(0.0, 0.0), size.scaled(moved), (size,))
        for size in tensors
        for name, kind, moved in kernels
        if moved
    ]


def _times(left: BatchPolynomial, right: BatchPolynomial) -> BatchPolynomial:
    """The product of two sizes, of which at most one grows with the batch."""
    return BatchPolynomial(
        left.constant * right.constant,
        left.constant * right.linear + left.linear * right.constant,
        left.linear * right.linear,
    )
