"""The memory that a rank needs under an engine: the tensors of eager PyTorch, in the sizes that the engine keeps them
in.

half weights   2 bytes of weight and 2 of gradient a parameter; the optimizer's state has 12, an fp32 copy and two
               moments, and 4 more where gradients are summed in fp32. Under FSDP the fp32 shards are the copy, so the
               weights stay as they are.                                                       engine_memory_inputs
activations    A GPT block saves 34 bytes a token and channel (Korthikanti et al. 2022, table 2) instead of what
autocast
               saves, half of that where only the input of a block is saved.                   _SAVED_SHARE
scores         5 bytes a pair of tokens and head (softmax, mask, dropout): between the passes, or, where they are
               recomputed, for the block whose backward pass runs.                             _score_changes
"""

from dataclasses import replace

from meshwright.plan import Plan
from meshwright.profile.values import MemoryChange, ModelProfile, Parameter, TraceSegment
from meshwright.simulator.runtime import MemoryInputs
from validation.engines.engine_traits import EngineTraits

_PAIR_BYTES = 5.0
# Chosen beside the memory that bigscience_a100's rows state. Autocast saves fp32 beside half precision, and a cast of
# the input for each product.
_SAVED_SHARE = 0.5
# Likewise. Of 16 bytes a score that a cross entropy takes at its peak, 10: softmax and gradient overwrite the fp32
# scores.
_LOSS_SHARE = 10 / 16


def engine_memory_inputs(inputs: MemoryInputs, plan: Plan, engine: EngineTraits) -> MemoryInputs:
    """The profile, optimizer and device with the bytes that the engine keeps."""
    profile, optimizer, device = inputs
    half = engine.keeps_half_weights(plan.numerics.precision)
    if not half and not engine.writes_scores:
        return inputs
    segments = tuple(_segment(segment, profile, engine, half) for segment in profile.segments)
    profile = replace(profile, segments=segments)
    if not half or (plan.axes.shard > 1 and plan.memory.sharding == "parameters"):
        return MemoryInputs(profile, optimizer, device)
    parameters = tuple(map(_halve_parameter, profile.parameters))
    # fp32 gradients are not divided over the shard axis, unlike the state that they are counted with.
    fp32_gradients = 4.0 * plan.axes.shard if engine.gradient_share == 1 else 0.0
    state = (4.0 + 4.0 * optimizer.state_ratio + fp32_gradients) / 2
    buffer_bytes = round(engine.exchange_buffer_bytes) if plan.axes.shard > 1 else 0
    return MemoryInputs(
        replace(profile, parameters=parameters),
        replace(optimizer, state_ratio=state, temporary_ratio=2 * optimizer.temporary_ratio),
        replace(device, workspace_bytes=device.workspace_bytes + buffer_bytes),
    )


def _halve_parameter(parameter: Parameter) -> Parameter:
    return replace(parameter, bytes=parameter.bytes // 2)


def _segment(segment: TraceSegment, profile: ModelProfile, engine: EngineTraits, half: bool) -> TraceSegment:
    changes = segment.changes
    if half:
        outside = _LOSS_SHARE if engine.fused else 1.0
        changes = tuple(
            _scale(change, _SAVED_SHARE if segment.blocks or change.role == "gradient" else outside)
            for change in changes
            if not _is_cast_weight(change)
        )
    if engine.writes_scores and segment.blocks:
        changes = (*changes, *_score_changes(segment, profile.recompute))
    return replace(segment, changes=tuple(sorted(changes, key=lambda change: change.after_operators)))


def _is_cast_weight(change: MemoryChange) -> bool:
    """Whether it is a cast of a weight, which autocast keeps: the only large tensors that do not grow with the
    batch."""
    return change.role != "gradient" and not change.bytes.linear and not change.bytes.square


def _scale(change: MemoryChange, share: float) -> MemoryChange:
    return replace(change, bytes=change.bytes.scaled(share))


def _score_changes(segment: TraceSegment, recompute: str) -> list[MemoryChange]:
    """The scores are allocated at the first attention operator, and freed behind the last one of the backward pass."""
    places = [number for number, operator in enumerate(segment.operators) if operator.kind == "attention"]
    if not places:
        return []
    operator = segment.operators[places[0]]
    batch, heads, queries, keys = operator.shape[:4]
    size = batch.scaled(_PAIR_BYTES * heads.constant * queries.constant * keys.constant)
    freed = size.scaled(-1.0)
    if recompute == "none":
        place, change = (places[0] + 1, size) if segment.phase == "forward" else (places[-1] + 1, freed)
        return [MemoryChange(place, change, "saved", operator.layer, split=operator.split)]
    if segment.phase == "forward":
        return []
    return [
        MemoryChange(places[0] + 1, size, "temporary", operator.layer, split=operator.split),
        MemoryChange(places[-1] + 1, freed, "temporary", operator.layer, split=operator.split),
    ]
