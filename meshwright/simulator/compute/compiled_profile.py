"""The profile of a model that `torch.compile` compiles: fused kernels take the place of the operators that they
compute, and only the tensors that kernels and products write are in memory (fusion.py)."""

from collections.abc import Collection
from dataclasses import replace
from math import ceil

from meshwright.blocks.module_names import is_inside
from meshwright.blocks.operator_kinds import OperatorKind
from meshwright.dtypes import ITEM_BYTES
from meshwright.plan import Plan
from meshwright.profile.values import BatchPolynomial, MemoryChange, MemoryRole, ModelProfile, Operator, TraceSegment
from meshwright.simulator.compute.fusion import (
    FusedStep,
    StepOperator,
    computes_statistics,
    fuse,
    reduces,
)
from meshwright.simulator.profile_cache import ProfileCache

FUSED = "fused"  # the name of operators that are kernels of the compiler
_NOTHING = BatchPolynomial(0.0, 0.0)
_FUSED_STEPS: ProfileCache[FusedStep] = ProfileCache(32)
_DECISIONS: ProfileCache[tuple[tuple[int, ...], tuple[int, ...]]] = ProfileCache(1024)
_COMPILED_PROFILES: ProfileCache[ModelProfile] = ProfileCache(192)
# Products with fewer FLOPs per byte wait for memory on every GPU of the catalog, and are not padded.
_PADDED_FLOPS_PER_BYTE = 100
_ALIGNED_BYTES = 16


def compiled_units(profile: ModelProfile, plan: Plan) -> tuple[str, ...]:
    """The modules that are compiled under the plan, each by itself: ("",) for the whole model with its loss, or with a
    pipeline for each stage, and () if nothing is compiled (parallel/compiled.py)."""
    if plan.compute.compile == "none" or plan.compile_obstacle:
        return ()
    if plan.axes.tensor > 1:
        return profile.blocks
    if not profile.blocks or (plan.compute.compile == "model" and plan.axes.shard == 1):
        return ("",)
    return profile.blocks


def compiled_profile(profile: ModelProfile, plan: Plan, batch: float) -> ModelProfile:
    """The profile of the model as the plan compiles it; the profile itself if nothing is compiled, or if the trace does
    not say which tensors operators read. Which values are saved, and which products get padded sizes, is decided for a
    batch of this many samples; for most batches the same is decided, so that they have one profile."""
    units = compiled_units(profile, plan)
    if not units:
        return profile
    exchanges = plan.numerics.batch_norm == "synchronized" and plan.data_ranks > 1
    key = (units, exchanges, plan.axes.tensor > 1)
    fused = _FUSED_STEPS.get(profile, key, lambda: _fused_step(profile, plan, units))
    if not any(step.operator.writes for step in fused.operators):
        return profile
    decisions = _DECISIONS.get(fused, batch, lambda: (fused.recomputed_for(batch), _padded_products(fused, batch)))
    return _COMPILED_PROFILES.get(fused, decisions, lambda: _compiled_profile(profile, fused, *decisions))


def _fused_step(profile: ModelProfile, plan: Plan, units: tuple[str, ...]) -> FusedStep:
    unit_of = _UnitOfLayers(units)
    operators = [
        StepOperator(operator, number, position, segment.phase == "backward", _unit(operator, unit_of, plan))
        for number, segment in enumerate(profile.segments)
        for position, operator in enumerate(segment.operators)
    ]
    return fuse(operators)


def _compiled_profile(
    profile: ModelProfile, structure: FusedStep, recomputed: tuple[int, ...], padded: tuple[int, ...]
) -> ModelProfile:
    fused, products = structure.with_recomputed(recomputed), frozenset(padded)
    operators = _operators(fused, len(profile.segments), products)
    return replace(
        profile,
        segments=tuple(
            replace(segment, operators=operators, changes=changes)
            for segment, operators, changes in zip(
                profile.segments, operators, _changes(fused, profile, products), strict=True
            )
        ),
    )


class _UnitOfLayers(dict[str, str | None]):
    """The compiled module that contains a layer, by the name of the layer; None if none does."""

    def __init__(self, units: tuple[str, ...]) -> None:
        self._units = units

    def __missing__(self, layer: str) -> str | None:
        self[layer] = next((unit for unit in self._units if not unit or is_inside(layer, unit)), None)
        return self[layer]


def _unit(operator: Operator, unit_of: _UnitOfLayers, plan: Plan) -> str | None:
    """The compiled module that an operator belongs to; None if it belongs to none. A BatchNorm whose ranks exchange
    statistics is not compiled, and neither is a loss in chunks."""
    exchanges = plan.numerics.batch_norm == "synchronized" and plan.data_ranks > 1
    if operator.chunks or (exchanges and computes_statistics(operator)):
        return None
    unit = unit_of[operator.layer]
    # Where layers are split, collectives lie between operators that every rank repeats and operators on shards.
    is_divided = plan.axes.tensor > 1 and unit is not None and operator.split is not None
    return f"{unit} divided" if is_divided else unit


# ---- operators


def _operators(fused: FusedStep, segments: int, padded: Collection[int]) -> list[tuple[Operator, ...]]:
    """The operators of each segment: products, of which some are `padded`, what is not compiled, and fused kernels. A
    kernel with operators of several segments has a part in each of them, which moves what those operators read and
    write."""
    placed: list[list[tuple[int, Operator]]] = [[] for _ in range(segments)]
    for kernel in fused.kernels:
        first = fused.operators[kernel.members[0]]
        if not first.is_fused:
            unfused = _padded(first.operator) if kernel.members[0] in padded else _unfused(first)
            placed[first.segment] += [(first.position, operator) for operator in unfused]
            continue
        for segment in sorted({fused.operators[number].segment for number in kernel.members}):
            members = [number for number in kernel.members if fused.operators[number].segment == segment]
            uses = (*kernel.reads.items(), *kernel.writes.items())
            moved = [value for value, number in uses if fused.operators[number].segment == segment]
            position, like = fused.operators[members[0]].position, fused.operators[members[0]].operator
            if moved:
                reduces_any = any(reduces(fused.operators[number].operator) for number in members)
                placed[segment].append((position, _kernel(like, fused.total_bytes(moved), reduces_any)))
            for number in members:
                if computes_statistics(fused.operators[number].operator):
                    read = fused.total_bytes(fused.sources(number))
                    placed[segment].append((position, _kernel(like, read, reduces=True)))
    return [tuple(operator for _, operator in sorted(found, key=lambda item: item[0])) for found in placed]


def _unfused(step: StepOperator) -> list[Operator]:
    """What runs in place of an operator that is not fused: the operator itself; for a compiled convolution without its
    bias, which a fused kernel adds, and whose gradient is summed by another kernel."""
    operator = step.operator
    if step.unit is None or operator.kind != "convolution":
        return [operator]
    width = operator.shape[4].constant
    uses = operator.writes if operator.computes_gradient else operator.reads
    biases = (use for use in uses[1:] if use.bytes.constant in (2 * width, 4 * width) and not _grows(use.bytes))
    bias = next(biases, None)
    if bias is None:
        return [operator]
    without_bias = replace(operator, bytes=_sum(operator.bytes, bias.bytes.scaled(-1.0)))
    if not operator.computes_gradient:
        return [without_bias]
    return [without_bias, _kernel(operator, _sum(operator.reads[0].bytes, bias.bytes), reduces=True)]


def _padded_products(fused: FusedStep, batch: float) -> tuple[int, ...]:
    """The compiled products whose operands are copied to sizes that are multiples of 16 bytes. The compiler pads
    products whose time depends on arithmetic (torch/_inductor/fx_passes/pad_mm.py)."""
    return tuple(
        number
        for number, step in enumerate(fused.operators)
        if step.unit is not None
        and step.operator.kind == "matmul"
        and step.operator.flops.at(batch) >= _PADDED_FLOPS_PER_BYTE * step.operator.bytes.at(batch)
        and _padding_bytes(step.operator).at(1)
    )


def _padded(operator: Operator) -> list[Operator]:
    """The product with padded sizes, and the kernel that copies its operands to these sizes."""
    copied = _padding_bytes(operator)
    count, *sizes = operator.shape
    item = ITEM_BYTES.get(operator.dtype, 4)
    padded = [size if _grows(size) else BatchPolynomial(_aligned(size, item), 0.0) for size in sizes]
    return [_kernel(operator, copied.scaled(2.0), reduces=False), replace(operator, shape=(count, *padded))]


def _padding_bytes(operator: Operator) -> BatchPolynomial:
    """The bytes of the operands of a product that are copied if it is padded, because one of their sizes is not a
    multiple of 16 bytes."""
    item = ITEM_BYTES.get(operator.dtype, 4)
    odd_m, odd_n, odd_k = (not _grows(size) and _aligned(size, item) != size.constant for size in operator.shape[1:])
    left, right = operator.reads[-2:] if len(operator.reads) > 1 else operator.reads * 2
    return _sum(left.bytes if odd_m or odd_k else _NOTHING, right.bytes if odd_n or odd_k else _NOTHING)


def _aligned(size: BatchPolynomial, item: int) -> float:
    return ceil(size.constant * item / _ALIGNED_BYTES) * _ALIGNED_BYTES / item


def _grows(size: BatchPolynomial) -> bool:
    return bool(size.linear or size.square)


def _kernel(like: Operator, moved: BatchPolynomial, reduces: bool) -> Operator:
    """A fused kernel that moves these bytes; layer and dtype are those of one of its operators. If it reduces anything,
    it is as fast as a sum."""
    kind: OperatorKind = "reduction" if reduces else "elementwise"
    gradient = like.computes_gradient
    return Operator(like.layer, FUSED, kind, like.dtype, _NOTHING, moved, (), like.split, computes_gradient=gradient)


def _sum(left: BatchPolynomial, right: BatchPolynomial) -> BatchPolynomial:
    return BatchPolynomial(left.constant + right.constant, left.linear + right.linear, left.square + right.square)


# ---- memory


def _changes(fused: FusedStep, profile: ModelProfile, padded: Collection[int]) -> list[tuple[MemoryChange, ...]]:
    """The changes of memory in each segment. A tensor is allocated by the operator that writes it, and freed by the
    last operator that reads it. A kernel may write a result over a tensor that nothing reads afterwards, so it frees
    first; a product allocates first."""
    # Which tensors splits divide is known of the uncompiled ones.
    marks = {_mark_key(change): change.split for segment in profile.segments for change in segment.changes}
    events: list[tuple[int, bool, MemoryChange]] = []  # the operator, whether it is done first, and the change
    for kernel in fused.kernels:
        is_fused = fused.operators[kernel.members[0]].is_fused
        for number in kernel.members:
            if number in padded:
                events += _padded_operands(fused, number)
            for use in fused.operators[number].operator.writes:
                readers = fused.readers.get(use.value, [])
                if not (readers or use.is_gradient) and is_fused:
                    continue
                events += _lifetime(fused, profile.segments, number, use.value, readers, use.is_gradient)
    changes: list[list[MemoryChange]] = [[] for _ in profile.segments]
    for number, _, change in sorted(events, key=lambda event: (event[0], not event[1])):
        marked = replace(change, split=marks.get(_mark_key(change)))
        changes[fused.operators[number].segment].append(marked)
    return [tuple(segment) for segment in changes]


def _mark_key(change: MemoryChange) -> tuple[str, bool, float, float]:
    return change.layer, change.role == "gradient", abs(change.bytes.constant), abs(change.bytes.linear)


def _padded_operands(fused: FusedStep, number: int) -> list[tuple[int, bool, MemoryChange]]:
    """The copies of a product's operands that are padded, which are in memory while the product runs."""
    operator = fused.operators[number].operator
    copied = _padding_bytes(operator)
    allocated = MemoryChange(0, copied, "temporary", operator.layer)
    return [(number, True, allocated), (number, False, replace(allocated, bytes=copied.scaled(-1.0)))]


def _lifetime(
    fused: FusedStep,
    segments: tuple[TraceSegment, ...],
    producer: int,
    value: int,
    readers: list[int],
    is_gradient: bool,
) -> list[tuple[int, bool, MemoryChange]]:
    """The allocation of a tensor and, unless it is a gradient, its release."""
    operators, size = fused.operators, fused.sizes[value]
    last = max([producer, *readers])
    role: MemoryRole = "temporary"
    if is_gradient:
        role = "gradient"
    elif operators[last].backward and not operators[producer].backward:
        role = "saved"
    layer, allocating, freeing = operators[producer].operator.layer, operators[producer], operators[last]
    allocated = (producer, not allocating.is_fused, MemoryChange(0, size, role, layer))
    if is_gradient:
        return [allocated]
    # Memory that every block allocates, but that is freed outside of blocks, is freed once per block.
    block_count = segments[allocating.segment].block_count
    count = 1 if segments[freeing.segment].blocks else block_count
    freed = MemoryChange(0, size.scaled(-1.0), role, layer, tensor_count=count)
    return [allocated, (last, freeing.is_fused, freed)]
