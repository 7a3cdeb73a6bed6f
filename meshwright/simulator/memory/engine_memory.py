"""What memory a rank needs under an engine: the tensors of eager PyTorch, in the sizes that the engine keeps them in.

half weights   2 bytes of weight and gradient a parameter, and 12 of an fp32 copy and two moments in the optimizer's
               state; fp32 gradients beside them, 4 more, where the engine sums in fp32. Under FSDP the fp32 shards
               are the copy: weights stay as they are
activations    what blocks keep: 34 bytes a token and channel of a GPT block (Korthikanti et al. 2022, table 2)
               instead of what autocast keeps, a half where only the input of a block is                    _KEPT
scores         5 bytes a pair of tokens and head: softmax, mask, dropout; between the passes, or (computed
               again) for the block whose backward pass runs                                              _scores
"""

from dataclasses import replace

from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.values import Change, ModelProfile, Parameter, Stretch
from meshwright.simulator.engine import Engine
from meshwright.simulator.memory.peak import DeviceMemory, MemoryPrediction, predict_memory

_PAIR_BYTES = 5.0
_KEPT = 0.5  # autocast keeps fp32 beside half precision, and a cast of the input for each product
# Of 16 bytes a score that a cross entropy takes at its peak, 10: softmax and gradient lie where the fp32 scores lay.
_LOSS_KEPT = 10 / 16


def engine_memory(
    profile: ModelProfile, plan: Plan, batch: int, optimizer: OptimizerCost, device: DeviceMemory, engine: Engine
) -> MemoryPrediction:
    """The peak of the worst rank, as `predict_memory` has it for eager PyTorch."""
    half = engine.half_weights and plan.numerics.precision in ("bf16", "fp16")
    if not half and not engine.scores:
        return predict_memory(profile, plan, batch, optimizer, device)
    stretches = tuple(_stretch(stretch, profile, engine, half) for stretch in profile.stretches)
    made = replace(profile, stretches=stretches)
    if not half or (plan.axes.shard > 1 and plan.memory.sharding == "parameters"):
        return predict_memory(made, plan, batch, optimizer, device)
    parameters = tuple(map(_halved, made.parameters))
    whole = 4.0 * plan.axes.shard if engine.gradient == 1 else 0.0  # not divided, where the state is
    state = (4.0 + 4.0 * optimizer.state + whole) / 2
    cost = replace(optimizer, state=state, temporary=2 * optimizer.temporary)
    beside = round(engine.buffers_bytes) if plan.axes.shard > 1 else 0
    kept = replace(device, workspace_bytes=device.workspace_bytes + beside)
    return predict_memory(replace(made, parameters=parameters), plan, batch, cost, kept)


def _halved(parameter: Parameter) -> Parameter:
    return replace(parameter, bytes=parameter.bytes // 2)


def _stretch(stretch: Stretch, profile: ModelProfile, engine: Engine, half: bool) -> Stretch:
    changes = stretch.changes
    if half:
        outside = _LOSS_KEPT if engine.fused else 1.0
        changes = tuple(
            _less(c, _KEPT if stretch.blocks or c.role == "gradient" else outside)
            for c in changes
            if not _of_weights(c)
        )
    if engine.scores and stretch.blocks:
        changes = (*changes, *_scores(stretch, profile.recompute))
    return replace(stretch, changes=tuple(sorted(changes, key=lambda change: change.operator)))


def _of_weights(change: Change) -> bool:
    """Casts of weights, which autocast keeps: the only large values that do not grow with the batch."""
    return change.role != "gradient" and not change.bytes.linear and not change.bytes.square


def _less(change: Change, part: float) -> Change:
    return replace(change, bytes=change.bytes.times(part))


def _scores(stretch: Stretch, recompute: str) -> list[Change]:
    """Taken where attention runs first, given back where its gradient is done."""
    places = [number for number, operator in enumerate(stretch.operators) if operator.kind == "attention"]
    if not places:
        return []
    operator = stretch.operators[places[0]]
    batch, heads, queries, keys = operator.shape[:4]
    size = batch.times(_PAIR_BYTES * heads.constant * queries.constant * keys.constant)
    back = size.times(-1.0)
    if recompute == "none":
        place, bytes_ = (places[0] + 1, size) if stretch.phase == "forward" else (places[-1] + 1, back)
        return [Change(place, bytes_, "saved", operator.layer, split=operator.split)]
    if stretch.phase == "forward":
        return []
    return [
        Change(places[0] + 1, size, "temporary", operator.layer, split=operator.split),
        Change(places[-1] + 1, back, "temporary", operator.layer, split=operator.split),
    ]
