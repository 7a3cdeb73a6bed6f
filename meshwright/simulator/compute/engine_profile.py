"""A model's profile as an engine runs it: the operators of eager PyTorch, less those that it does not run.

half weights   no casts of weights and activations; what blocks, tables of words and sums of gradients move in fp32
               moves in half as many bytes                                                                  _halved
fused          dropout is part of the residual sum behind it, masks and all                                 _kept
               casts of activations are part of what reads or writes them, which moves half as many bytes   _operators
scores         attention = q kᵀ, softmax, dropout, p v: products over all pairs, of which softmax reads and writes 2
               numbers, dropout 2 and a byte of mask; backward = four products, 3 numbers, 2 and the mask. Where it is
               not fused, what lies ahead is filled in before, 2 numbers in both passes. Where that is done in place
               in a view, autograd's CopySlices copies the gradient five times and zeroes it once          _scores
plain loss     of all scores, cast to fp32: their maximum, that subtracted, exp, its sum, divided; backward scaled and
               cast back: 4, 8, 8, 4, 8 and 8 bytes, and 6 each way                                         _lines
casts          of a weight that is split, each rank's part                                                  _cast
"""

from dataclasses import replace

from meshwright.profile.values import ITEM_BYTES, Growth, Kind, ModelProfile, Operator, Stretch
from meshwright.simulator.engine import Engine

_OF_SCORES = ("bmm", "fused_log_softmax", "masked_fill", "softmax", "native_dropout")
_DROPOUT = ("empty_like", "bernoulli_", "div_", "mul", "native_dropout")
_HALVES = {"bf16": "bfloat16", "fp16": "float16"}
_LIKED = 8  # tensor cores take sizes of 16 bytes, eight numbers in half precision
# Numbers a pair of tokens that softmax moves, dropout beside a mask of one byte, and filling in what lies ahead.
_SOFTMAX_FORWARD, _SOFTMAX_BACKWARD, _DROPPED, _FILLED = 2, 3, 2, 2
# By what eager PyTorch runs, the bytes that it moves for a score, and what moves how many instead.
_LINES: dict[str, tuple[float, list[tuple[str, Kind, float]]]] = {
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
_SLICED = [("zero", 1), *[("copy", 2)] * 5]  # as torch's profiler lists them, and the numbers that each moves


def run_by(profile: ModelProfile, engine: Engine) -> ModelProfile:
    """Operators alone, for their time: what memory an engine needs is engine_memory.py's."""
    homes = _split_homes(profile)
    stretches = [
        replace(stretch, operators=tuple(_operators(stretch, profile, engine, homes)), changes=())
        for stretch in profile.stretches
    ]
    if profile.recompute == "selective" and (engine.again or engine.again_scores):
        stretches = _again(stretches, engine)
    return replace(profile, stretches=tuple(stretches))


def padded(profile: ModelProfile, engine: Engine) -> ModelProfile:
    """Sizes of a vocabulary's products that the matrix library likes. Batched products are attention's, and stay."""
    if engine.pads == 1:
        return profile

    def pad(size: Growth) -> Growth:
        odd = size.constant > engine.pads and size.constant % _LIKED
        return Growth(-(-size.constant // engine.pads) * engine.pads, 0.0) if odd else size

    def fill(operator: Operator) -> Operator:
        plain = operator.kind == "matmul" and operator.shape[0] == Growth(1.0, 0.0)
        return replace(operator, shape=tuple(map(pad, operator.shape))) if plain else operator

    stretches = tuple(replace(s, operators=tuple(map(fill, s.operators))) for s in profile.stretches)
    return replace(profile, stretches=stretches)


def _again(stretches: list[Stretch], engine: Engine) -> list[Stretch]:
    """What a block's forward pass computes, in part once more before its backward pass."""
    forward = {
        stretch.blocks: stretch.operators for stretch in stretches if stretch.blocks and stretch.phase == "forward"
    }
    made = []
    for stretch in stretches:
        before: list[Operator] = []
        for operator in forward.get(stretch.blocks[::-1], forward.get(stretch.blocks, ())):
            attends = operator.name in _OF_SCORES or operator.kind == "attention"
            share = float(engine.again_scores) if attends else engine.again * (operator.kind == "matmul")
            if share:
                before.append(_more(operator, share))
        made.append(
            replace(stretch, operators=(*before, *stretch.operators)) if stretch.phase == "backward" else stretch
        )
    return made


def _split_homes(profile: ModelProfile) -> dict[str, str]:
    """The group that a module is split with."""
    splits = profile.structure.splits if profile.structure else ()
    return {member.module: group.name for group in splits for member in group.splits}


def _operators(stretch: Stretch, profile: ModelProfile, engine: Engine, homes: dict[str, str]) -> list[Operator]:
    found: list[Operator] = []
    low = profile.precision in ("bf16", "fp16")
    half, fused = engine.half_weights and low, engine.fused and low
    for operator in stretch.operators:
        if operator.name == "empty_like" or (engine.fused and not _kept(operator, stretch)):
            continue
        if _is_cast(operator):
            if not (half or (fused and not _is_of_weight(operator))):
                found.append(_cast(operator, homes))
            continue
        if engine.plain_loss and operator.name in _LINES:
            found += _lines(operator, _HALVES[profile.precision] if half or fused else None)
            continue
        if operator.kind == "attention" and engine.scores:
            found += _scores(operator, stretch.phase == "backward", engine)
            continue
        if operator.kind == "attention" and engine.attention != 1:
            operator = _more(operator, engine.attention)
        halves = half and (stretch.blocks or operator.kind == "embedding" or _is_of_weight(operator))
        narrow = fused and stretch.blocks and not _is_of_weight(operator)
        found.append(_halved(operator) if halves or narrow else operator)
    return found


def _kept(operator: Operator, stretch: Stretch) -> bool:
    return not (operator.layer.endswith("dropout") and operator.name in _DROPOUT and stretch.phase == "forward")


def _is_cast(operator: Operator) -> bool:
    return operator.kind == "copy" and operator.name == "_to_copy"


def _cast(operator: Operator, homes: dict[str, str]) -> Operator:
    if not _is_of_weight(operator) or operator.split or operator.layer not in homes:
        return operator
    return replace(operator, split=homes[operator.layer])


def _is_of_weight(operator: Operator) -> bool:
    return all(not size.linear and not size.square for size in operator.shape)


def _halved(operator: Operator) -> Operator:
    if operator.dtype != "float32" or operator.kind not in ("norm", "elementwise", "reduction", "copy", "embedding"):
        return operator
    return replace(operator, bytes=operator.bytes.times(0.5))


def _scores(operator: Operator, backward: bool, engine: Engine) -> list[Operator]:
    batch, heads, queries, keys, width = operator.shape[:5]
    many = batch.times(heads.constant)
    pairs = queries.constant * keys.constant
    across = (many, queries, keys, width)  # scores, or their gradient
    along = (many, queries, width, keys)  # values mixed, or a gradient of q, k or v
    flops = many.times(2 * pairs * width.constant)
    item = ITEM_BYTES.get(operator.dtype, 4)
    sizes = (2 * width.constant * queries.constant + pairs) * item  # bytes of one product
    products = (across, along) if not backward else (across, along, along, along)
    made = [
        replace(operator, name="bmm", kind="matmul", flops=flops, bytes=many.times(sizes), shape=shape)
        for shape in products
    ]
    softmax = (_SOFTMAX_BACKWARD if backward else _SOFTMAX_FORWARD) * item
    # One kernel that goes over the scores once, as that of a softmax's logarithm does; or PyTorch's own.
    moved = (
        [("fused_log_softmax", softmax)] if engine.fused else [("masked_fill", _FILLED * item), ("softmax", softmax)]
    )
    if engine.masks_views and not engine.fused and backward:
        moved += [(name, numbers * item) for name, numbers in _SLICED]
    if engine.drops_scores:
        moved.append(("native_dropout", _DROPPED * item + 1))
    between = [
        replace(
            operator,
            name=name,
            kind="elementwise",
            flops=Growth(0.0, 0.0),
            bytes=many.times(size * pairs),
            shape=(many.times(pairs),),
        )
        for name, size in moved
    ]
    return [*made, *between]


def _lines(operator: Operator, half: str | None) -> list[Operator]:
    """`half`: the type that scores are cast from, and their gradient to, where those casts are not among the others."""
    moved, lines = _LINES[operator.name]
    made = [
        replace(operator, name=name, kind=kind, bytes=operator.bytes.times(size / moved)) for name, kind, size in lines
    ]
    if half and lines:
        cast_from = half if operator.name == "_log_softmax" else operator.dtype
        six = operator.bytes.times(6 / moved)
        made.append(replace(operator, name="_to_copy", kind="copy", dtype=cast_from, bytes=six))
    return made


def _more(operator: Operator, factor: float) -> Operator:
    """As many times the work, in the same shape."""
    return replace(operator, flops=operator.flops.times(factor), bytes=operator.bytes.times(factor))
