"""A model's profile as an engine executes it: the operators of eager PyTorch, less those that it fuses, plus those that
it executes more often.

half weights   There are no casts of weights and activations. What blocks, embeddings and sums of gradients move in fp32
               is half as many bytes.                                                                  _halve_bytes
fused          Dropout is part of the residual sum behind it, including its mask.                      _is_fused_dropout
               Casts of activations are part of the operators before and behind, which move half as many bytes.
                                                                                                       _operators
scores         Attention = q kᵀ, softmax, dropout, p v: products over all pairs of tokens. Softmax reads and writes 2
               numbers a pair, dropout 2 and a byte of mask; the backward pass has four products, 3 numbers, 2 and the
               mask. Where it is not fused, the causal mask is filled in before, 2 numbers in both passes. Where that is
               done in place in a view, autograd's CopySlices copies the gradient five times and zeroes it once.
                                                                                                       _score_operators
unfused loss   Of all scores, cast to fp32: maximum, subtraction, exp, sum and division; backward scaling and a cast
               back: 4, 8, 8, 4, 8 and 8 bytes a score, and 6 for each cast.                           _loss_lines
"""

from collections.abc import Mapping
from dataclasses import replace

from meshwright.blocks.operator_kinds import OperatorKind
from meshwright.dtypes import ITEM_BYTES
from meshwright.profile.values import BatchPolynomial, ModelProfile, Operator, TraceSegment
from meshwright.simulator.compute.executed_profile import (
    ALLOCATION,
    is_cast,
    is_of_weight,
    mark_split_cast,
    split_group_of_modules,
)
from validation.engines.engine_traits import EngineTraits

_SCORE_OPERATORS = ("bmm", "fused_log_softmax", "masked_fill", "softmax", "native_dropout")
_DROPOUT_OPERATORS = ("empty_like", "bernoulli_", "div_", "mul", "native_dropout")
_HALF_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_ALIGNED_NUMBERS = 8  # tensor cores load 16 bytes, eight numbers in half precision
# Numbers that are moved for a pair of tokens: by softmax, by dropout (beside a mask of one byte), by filling in the
# mask.
_SOFTMAX_FORWARD, _SOFTMAX_BACKWARD, _DROPOUT, _MASK_FILL = 2, 3, 2, 2
# By the operator of eager PyTorch: the bytes that it moves for a score, and the operators that replace it with theirs.
_LOSS_LINES: dict[str, tuple[float, list[tuple[str, OperatorKind, float]]]] = {
    "_log_softmax": (
        8.0,
        [
            ("amax", "reduction", 4),
            ("sub", "elementwise", 8),
            ("exp", "elementwise", 8),
            ("sum", "reduction", 4),
            ("div", "elementwise", 8),
        ],
    ),
    "nll_loss_forward": (4.0, []),
    "nll_loss_backward": (8.0, []),
    "_log_softmax_backward_data": (12.0, [("mul", "elementwise", 8)]),
}
# What autograd's CopySlices executes, as torch's profiler lists it, and the numbers that each operator moves.
_COPY_SLICES = [("zero", 1), *[("copy", 2)] * 5]


def engine_profile(profile: ModelProfile, engine: EngineTraits) -> ModelProfile:
    """The profile with the operators that the engine executes, and without memory changes: it is for predicting
    time. engine_memory.py has the memory."""
    groups = split_group_of_modules(profile)
    segments = [
        replace(segment, operators=tuple(_operators(segment, profile, engine, groups)), changes=())
        for segment in profile.segments
    ]
    if profile.recompute == "selective" and (engine.recomputed_products or engine.recomputes_attention):
        segments = _with_recomputed(segments, engine)
    executed = replace(profile, segments=tuple(segments))
    return _divide_experts(executed, engine.expert_parts) if engine.expert_parts > 1 else executed


def _divide_experts(profile: ModelProfile, parts: int) -> ModelProfile:
    """The profile with a part of the rows and of the weights of experts, as each rank of the tensor axis has them."""
    modules = {name for layer in profile.experts for name in layer.modules}
    weights = {name for layer in profile.experts for name in layer.parameters}

    def divide(operator: Operator) -> Operator:
        if operator.layer not in modules:
            return operator
        shape = tuple(BatchPolynomial(s.constant, s.linear / parts, s.square / parts) for s in operator.shape)
        return replace(_multiply_work(operator, 1 / parts), shape=shape)

    segments = tuple(replace(s, operators=tuple(map(divide, s.operators))) for s in profile.segments)
    parameters = tuple(replace(p, bytes=p.bytes // parts) if p.names[0] in weights else p for p in profile.parameters)
    return replace(profile, segments=segments, parameters=parameters)


def pad_vocabulary(profile: ModelProfile, multiple: int) -> ModelProfile:
    """The profile with odd sizes of plain products padded to a multiple. Batched products are attention's, and stay."""
    if multiple == 1:
        return profile

    def pad_size(size: BatchPolynomial) -> BatchPolynomial:
        is_odd = size.constant > multiple and size.constant % _ALIGNED_NUMBERS
        return BatchPolynomial(-(-size.constant // multiple) * multiple, 0.0) if is_odd else size

    def pad_operator(operator: Operator) -> Operator:
        is_plain = operator.kind == "matmul" and operator.shape[0] == BatchPolynomial(1.0, 0.0)
        return replace(operator, shape=tuple(map(pad_size, operator.shape))) if is_plain else operator

    segments = tuple(replace(s, operators=tuple(map(pad_operator, s.operators))) for s in profile.segments)
    return replace(profile, segments=segments)


def _with_recomputed(segments: list[TraceSegment], engine: EngineTraits) -> list[TraceSegment]:
    """Each block's backward pass begins with the part of its forward pass that is computed again."""
    forward = {
        segment.blocks: segment.operators for segment in segments if segment.blocks and segment.phase == "forward"
    }
    recomputing = []
    for segment in segments:
        recomputed: list[Operator] = []
        for operator in forward.get(segment.blocks[::-1], forward.get(segment.blocks, ())):
            attends = operator.name in _SCORE_OPERATORS or operator.kind == "attention"
            share = (
                float(engine.recomputes_attention)
                if attends
                else engine.recomputed_products * (operator.kind == "matmul")
            )
            if share:
                recomputed.append(_multiply_work(operator, share))
        is_backward = segment.phase == "backward"
        recomputing.append(replace(segment, operators=(*recomputed, *segment.operators)) if is_backward else segment)
    return recomputing


def _operators(
    segment: TraceSegment, profile: ModelProfile, engine: EngineTraits, groups: Mapping[str, str]
) -> list[Operator]:
    operators: list[Operator] = []
    is_half_precision = profile.precision in _HALF_DTYPES
    half, fused = engine.half_weights and is_half_precision, engine.fused and is_half_precision
    for operator in segment.operators:
        if operator.name == ALLOCATION or (engine.fused and _is_fused_dropout(operator, segment)):
            continue
        if is_cast(operator):
            if not (half or (fused and not is_of_weight(operator))):
                operators.append(mark_split_cast(operator, groups))
            continue
        if engine.unfused_loss and operator.name in _LOSS_LINES:
            operators += _loss_lines(operator, _HALF_DTYPES[profile.precision] if half or fused else None)
            continue
        if operator.kind == "attention" and engine.writes_scores:
            operators += _score_operators(operator, segment.phase == "backward", engine)
            continue
        if operator.kind == "attention" and engine.attention_slowdown != 1:
            operator = _multiply_work(operator, engine.attention_slowdown)
        halves = half and (segment.blocks or operator.kind == "embedding" or is_of_weight(operator))
        narrow = fused and segment.blocks and not is_of_weight(operator)
        operators.append(_halve_bytes(operator) if halves or narrow else operator)
    return operators


def _is_fused_dropout(operator: Operator, segment: TraceSegment) -> bool:
    return operator.layer.endswith("dropout") and operator.name in _DROPOUT_OPERATORS and segment.phase == "forward"


def _halve_bytes(operator: Operator) -> Operator:
    if operator.dtype != "float32" or operator.kind not in ("norm", "elementwise", "reduction", "copy", "embedding"):
        return operator
    return replace(operator, bytes=operator.bytes.scaled(0.5))


def _score_operators(operator: Operator, backward: bool, engine: EngineTraits) -> list[Operator]:
    """Attention that writes its scores to memory, as products and elementwise operators."""
    batch, heads, queries, keys, width = operator.shape[:5]
    sequences = batch.scaled(heads.constant)
    pairs = queries.constant * keys.constant
    scores_shape = (sequences, queries, keys, width)  # scores, or their gradient
    values_shape = (sequences, queries, width, keys)  # values mixed, or a gradient of q, k or v
    flops = sequences.scaled(2 * pairs * width.constant)
    item = ITEM_BYTES.get(operator.dtype, 4)
    product_bytes = (2 * width.constant * queries.constant + pairs) * item
    shapes = [scores_shape, *[values_shape] * (3 if backward else 1)]
    products = [
        replace(operator, name="bmm", kind="matmul", flops=flops, bytes=sequences.scaled(product_bytes), shape=shape)
        for shape in shapes
    ]
    between = [
        replace(
            operator,
            name=name,
            kind="elementwise",
            flops=BatchPolynomial(0.0, 0.0),
            bytes=sequences.scaled(pair_bytes * pairs),
            shape=(sequences.scaled(pairs),),
        )
        for name, pair_bytes in _pair_bytes(item, backward, engine)
    ]
    return [*products, *between]


def _pair_bytes(item: int, backward: bool, engine: EngineTraits) -> list[tuple[str, int]]:
    """The elementwise operators over all scores, with the bytes that each moves for a pair of tokens."""
    softmax = (_SOFTMAX_BACKWARD if backward else _SOFTMAX_FORWARD) * item
    # One kernel that goes over the scores once, as that of a softmax's logarithm does; or PyTorch's own two.
    operators = (
        [("fused_log_softmax", softmax)] if engine.fused else [("masked_fill", _MASK_FILL * item), ("softmax", softmax)]
    )
    if engine.masks_scores_in_place and not engine.fused and backward:
        operators += [(name, numbers * item) for name, numbers in _COPY_SLICES]
    if engine.drops_scores:
        operators.append(("native_dropout", _DROPOUT * item + 1))
    return operators


def _loss_lines(operator: Operator, half_dtype: str | None) -> list[Operator]:
    """The operators of a loss that is computed line by line. Scores are cast from `half_dtype`, and their gradient to
    it; None where the profile has those casts already."""
    score_bytes, lines = _LOSS_LINES[operator.name]
    operators = [
        replace(operator, name=name, kind=kind, bytes=operator.bytes.scaled(size / score_bytes))
        for name, kind, size in lines
    ]
    if half_dtype and lines:
        cast_from = half_dtype if operator.name == "_log_softmax" else operator.dtype
        cast_bytes = operator.bytes.scaled(6 / score_bytes)
        operators.append(replace(operator, name="_to_copy", kind="copy", dtype=cast_from, bytes=cast_bytes))
    return operators


def _multiply_work(operator: Operator, factor: float) -> Operator:
    """The operator with as many times the work, in the same shape."""
    return replace(operator, flops=operator.flops.scaled(factor), bytes=operator.bytes.scaled(factor))
