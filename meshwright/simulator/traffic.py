"""The bytes that a rank exchanges in a step, by axis and collective. Tests compare them with the bytes that a run was
counted to exchange (tests/proof/traffic/counter.py).

    split layers   in every microbatch, along the tensor axis and, for wide layers, the replicate axis     _split_layers
    branches       on different ranks of the tensor axis: their outputs and the gradients of their inputs, in every
                   microbatch (branches.py); for the rank that holds and sends most                          exchanges
    tokens         to the experts of other ranks and back, in every microbatch                            _tokens
    statistics     of synchronized BatchNorm, in every microbatch; `data` are the replicate and shard axes _statistics
    gradients      once a step; with a tensor or pipeline axis one number per weight, too: whether it is used  _replicas
    shards         in units, one per block and one for the rest; padded where ranks do not divide the rows _shards
                     scattered   in every microbatch; once a step for the `optimizer` level, and in a pipeline
                     gathered    once a step; for the `parameters` level in every pass that starts with a freed
                                 block: a block is freed after its forward pass and, except in pipelines, after
                                 its backward pass. Weights in no block stay gathered between both passes
    tied weights   on several ranks of a pipeline: their gradients are summed once a step                  _tied
    attention      along the context axis: keys and values, in every microbatch (context.py)          _with_context
    stages         activations and gradients that cross the cuts before and after them, in every microbatch _cuts
    buffers        from the first data rank to the others, once a step                                     _buffers

The sizes are those that exchange.py prices. It prices shards as if all weights were in equal blocks, and leaves out
statistics and buffers, which are small; shared_weights.py prices tied weights. Sums of losses, norms, flags and sizes
are in neither.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from meshwright.blocks.module_names import is_inside
from meshwright.cluster.cluster import Collective
from meshwright.plan import Plan
from meshwright.plan_fields.shares import share_sizes
from meshwright.profile.values import ModelProfile, Parameter
from meshwright.simulator.communication.exchange import batch_norm_messages, exchanged_pieces
from meshwright.simulator.context import key_value_messages, without_context
from meshwright.simulator.experts import divided_profile, expert_messages, expert_names, joined_axis, mesh_sizes
from meshwright.simulator.pipeline.order import Action, pipeline_order, stages_of_rank
from meshwright.simulator.pipeline.shared_weights import tied_parameters
from meshwright.simulator.pipeline.stages import StageProfile, stage_profiles
from meshwright.simulator.runtime import OUR_RUNTIME, Runtime
from meshwright.simulator.tensor.branches import branch_messages, branch_rank_profiles, plan_outside_branches
from meshwright.simulator.tensor.messages import tensor_messages
from meshwright.simulator.tensor.split_profile import replicate_split_parameters, split_profile
from meshwright.simulator.tensor.standalone_splits import with_standalone_splits

_DATA = ("replicate", "shard", "expert")


@dataclass(frozen=True)
class Exchange:
    """`count` equal collectives along an axis. `bytes` is the size of the whole tensor; of one rank's share for an
    all-to-all; of the message for `point_to_point`."""

    axis: str
    collective: Collective
    bytes: float
    count: int


def exchanges(
    profile: ModelProfile, plan: Plan, batch: float, runtime: Runtime = OUR_RUNTIME, pipeline_rank: int = 0
) -> tuple[Exchange, ...]:
    """Returns the exchanges of a step whose microbatches have `batch` samples per rank, with equal collectives counted
    together. Among the ranks of the other axes, the rank that holds and sends most is described."""
    if plan.axes.context > 1:
        return _with_context(profile, plan, batch, runtime, pipeline_rank)
    marked, rounds = with_standalone_splits(profile, plan), plan.memory.accumulation * plan.pipeline.microbatches
    ranks = [
        _count_rank(rank_profile, plan_outside_branches(marked, plan), batch, runtime, pipeline_rank)
        for rank_profile in branch_rank_profiles(marked, plan)
    ]
    counted = max(ranks, key=lambda rank: sum(bytes_ * count for (*_, bytes_), count in rank.items()))
    for message in branch_messages(marked, plan, batch):
        counted["tensor", message.collective, message.bytes] += message.times * rounds
    return tuple(Exchange(*key, count) for key, count in sorted(counted.items()) if key[2] and count)


_Counts = Counter[tuple[str, Collective, float]]


def _with_context(
    profile: ModelProfile, plan: Plan, batch: float, runtime: Runtime, pipeline_rank: int
) -> tuple[Exchange, ...]:
    """The exchanges of a plan with a context axis. Its ranks exchange gradients and weights together with those of the
    axis that `without_context` joins them with; the axis is then `data`, or `context` if it is the only one. Experts
    that are divided over all ranks of that axis have copies or shards on context ranks only."""
    axes, batch = plan.axes, batch / plan.axes.context
    joined = "shard" if axes.shard > 1 else "replicate"
    name = "data" if mesh_sizes(axes)[joined] > 1 else "context"
    marked = with_standalone_splits(profile, plan)
    counted: _Counts = Counter()
    for (axis, collective, size), count in _count_rank(
        marked, without_context(plan), batch, runtime, pipeline_rank, in_ddp=False
    ).items():
        counted[name if axis == joined else axis, collective, size] += count
    parts = stage_profiles(split_profile(marked, plan), plan.pipeline.cuts)
    for number in _stages_of(plan, pipeline_rank):
        local = replace(parts[number].profile, structure=profile.structure)
        for message in key_value_messages(local, plan, batch):
            counted["context", message.collective, message.bytes] += message.times * plan.microbatches
    return tuple(Exchange(*key, count) for key, count in sorted(counted.items()) if key[2] and count)


def _count_rank(
    marked: ModelProfile, plan: Plan, batch: float, runtime: Runtime, pipeline_rank: int, in_ddp: bool = True
) -> _Counts:
    """`in_ddp`: a plan whose only axis is replicate runs in DDP."""
    stages = stage_profiles(marked, plan.pipeline.cuts)
    parts = stage_profiles(divided_profile(split_profile(marked, plan), plan), plan.pipeline.cuts)
    local_stages = _stages_of(plan, pipeline_rank)
    rounds = plan.memory.accumulation * plan.pipeline.microbatches
    local_parts = {number: parts[number] for number in local_stages}
    counted: _Counts = Counter()
    for some_exchanges in (
        _split_layers([stages[number] for number in local_stages], plan, batch, runtime, rounds),
        _tokens([stages[number] for number in local_stages], plan, batch, rounds),
        _statistics([stages[number] for number in local_stages], plan, rounds),
        _replicas(list(local_parts.values()), plan, runtime, in_ddp=in_ddp and plan.world_size == plan.axes.replicate),
        _shards(local_parts, plan, runtime, pipeline_rank),
        _tied(parts, plan, pipeline_rank),
        _cuts(local_stages, stages, plan, batch, runtime, rounds),
        _buffers(list(local_parts.values()), plan),
    ):
        for exchange in some_exchanges:
            counted[exchange.axis, exchange.collective, exchange.bytes] += exchange.count
    return counted


def _stages_of(plan: Plan, rank: int) -> tuple[int, ...]:
    ranks = plan.axes.pipeline
    return stages_of_rank(plan.pipeline.schedule, ranks, plan.stages_per_rank, rank) if ranks > 1 else (0,)


def _split_layers(
    stages: Iterable[StageProfile], plan: Plan, batch: float, runtime: Runtime, rounds: int
) -> Iterator[Exchange]:
    for stage in stages:
        along, wide = tensor_messages(stage.profile, plan, batch, runtime)
        for axis, messages in (("tensor", along), ("replicate", wide)):
            for message in messages:
                yield Exchange(axis, message.collective, message.bytes, message.times * rounds)


def _tokens(stages: Iterable[StageProfile], plan: Plan, batch: float, rounds: int) -> Iterator[Exchange]:
    for stage in stages:
        for message in expert_messages(stage.profile, plan, batch):
            yield Exchange("expert", message.collective, message.bytes, message.times * rounds)


def _statistics(stages: Iterable[StageProfile], plan: Plan, rounds: int) -> Iterator[Exchange]:
    for stage in stages:
        for message in batch_norm_messages(stage.profile, plan):
            axis = joined_axis(plan.axes, _DATA)
            yield Exchange(axis, message.collective, message.bytes, message.times * rounds)


# ---- gradients and weights


def _averaged_parameters(part: StageProfile, plan: Plan) -> list[Parameter]:
    not_averaged = replicate_split_parameters(part.profile, plan)
    return [p for p in part.profile.parameters if p.trainable and p.names[0] not in not_averaged]


def _replicas(parts: list[StageProfile], plan: Plan, runtime: Runtime, *, in_ddp: bool) -> Iterator[Exchange]:
    if plan.axes.replicate == 1 or plan.axes.shard > 1:
        return
    trained = {p.names[0]: p for part in parts for p in _averaged_parameters(part, plan)}
    experts = {name for part in parts for name in expert_names(part.profile)} if plan.axes.expert > 1 else set()
    of_experts, of_others = (
        [p for name, p in trained.items() if (name in experts) == is_in] for is_in in (True, False)
    )
    has_flags = not in_ddp or plan.axes.expert > 1
    groups = [(joined_axis(plan.axes, _DATA), of_others)]
    if mesh_sizes(plan.axes)["replicate"] > 1:
        groups.append(("replicate", of_experts))
    for axis, parameters in groups:
        size = sum(p.bytes for p in parameters)
        if has_flags:
            size += sum(p.bytes // max(1, prod(p.shape)) for p in parameters)
        pieces, gradient, _ = exchanged_pieces(size, 0, plan, runtime)
        yield Exchange(axis, "all_reduce", gradient, pieces)


def _shards(parts: dict[int, StageProfile], plan: Plan, runtime: Runtime, rank: int) -> Iterator[Exchange]:
    shard, level = plan.axes.shard, plan.memory.sharding
    if shard == 1:
        return
    rounds = plan.memory.accumulation * plan.pipeline.microbatches
    exchange = runtime.parameter_exchange(plan)
    scattered = 1 if level == "optimizer" or plan.axes.pipeline > 1 else rounds
    for number, part in parts.items():
        block_gathers = _gatherings(number, plan, rank) if level == "parameters" else 1
        rest_gathers = rounds if level == "parameters" and plan.axes.pipeline == 1 else 1
        experts = expert_names(part.profile) if plan.axes.expert > 1 else frozenset()
        for unit, times in _units(part, plan, block_gathers, rest_gathers):
            parameters = [p for p in unit if p.names[0] not in experts]
            padded = {p.names[0]: _padded_bytes(p, shard, plan.shares.uneven_shards) for p in parameters}
            weight = sum(padded.values()) * exchange.weight_share
            gradient = sum(padded[p.names[0]] for p in parameters if p.trainable) * exchange.gradient_share
            axis = joined_axis(plan.axes, ("shard", "expert"))
            yield Exchange(axis, "all_gather", weight, times)
            yield Exchange(axis, "reduce_scatter", gradient, scattered)
            if plan.axes.replicate > 1:
                yield Exchange("replicate", "all_reduce", gradient / shard, 1)
            divided = [p for p in unit if p.names[0] in experts]
            yield from _shards_of_experts(
                divided, plan, exchange.weight_share, exchange.gradient_share, times, scattered
            )


def _shards_of_experts(
    parameters: list[Parameter], plan: Plan, weight_share: float, gradient_share: float, gathers: int, scattered: int
) -> Iterator[Exchange]:
    """The rank's experts, sharded over the rest of the shard axis; whole if there is no rest."""
    shard = mesh_sizes(plan.axes)["shard"]
    sizes = {p.names[0]: _divided_bytes(p, plan.axes.expert, shard) for p in parameters}
    trained = sum(sizes[p.names[0]] for p in parameters if p.trainable)
    if shard > 1:
        yield Exchange("shard", "all_gather", sum(sizes.values()) * weight_share, gathers)
        yield Exchange("shard", "reduce_scatter", trained * gradient_share, scattered)
    if plan.axes.replicate > 1:
        flags = 0 if shard > 1 else sum(p.bytes // max(1, prod(p.shape)) for p in parameters if p.trainable)
        yield Exchange("replicate", "all_reduce", trained * gradient_share / shard + flags, 1)


def _units(
    part: StageProfile, plan: Plan, block_gathers: int, rest_gathers: int
) -> Iterator[tuple[list[Parameter], int]]:
    """Yields the parameters that are gathered together, and how often they are gathered."""
    blocks = part.profile.blocks
    # In a model without lists of blocks the blocks are its children; a stage is one unit then.
    if plan.axes.pipeline > 1:
        blocks = tuple(block for block in blocks if "." in block or block.isdigit())
    remaining = list(part.profile.parameters)
    for block in blocks:
        inside = [p for p in remaining if any(is_inside(name, block) for name in p.names)]
        if inside and all(is_inside(name, block) for p in inside for name in p.names):
            yield inside, block_gathers
            remaining = [p for p in remaining if p not in inside]
    if remaining:
        yield remaining, rest_gathers


def _gatherings(stage: int, plan: Plan, rank: int) -> int:
    """Returns how many passes of a step must gather a block. Each forward pass frees it, and each backward pass outside
    of a pipeline."""
    if plan.axes.pipeline == 1:
        return 2 * plan.memory.accumulation
    gathers, is_gathered = 0, False
    for action in _actions(plan, rank) * plan.memory.accumulation:
        if action.stage == stage:
            gathers += not is_gathered
            is_gathered = action.kind != "forward"
    return gathers


def _actions(plan: Plan, rank: int) -> tuple[Action, ...]:
    shape = plan.pipeline
    return pipeline_order(shape.schedule, plan.axes.pipeline, plan.stages_per_rank, shape.microbatches)[rank]


def _padded_bytes(parameter: Parameter, ranks: int, proportions: Sequence[int] = ()) -> float:
    """Returns the bytes when every rank has as many rows as the one with most; if there are `proportions`, ranks have
    their rows in these. A single number is not sharded: 0."""
    rows = parameter.shape[0] if parameter.shape else 0
    most = max(share_sizes(rows, proportions)) if proportions else -(-rows // ranks)
    return parameter.bytes * most * ranks / rows if rows else 0.0


def _divided_bytes(parameter: Parameter, experts: int, ranks: int) -> float:
    """The bytes of a rank's part of stacked experts when its shards on `ranks` ranks are equally large: of whole
    experts or, where `ranks` does not divide them, of the rows of each expert, if it divides these. If experts are a
    list of modules, `ranks` is 1."""
    rows = parameter.shape[0] // experts
    if ranks == 1 or (rows % ranks and parameter.shape[1] % ranks == 0):
        return parameter.bytes / experts
    return _padded_bytes(replace(parameter, shape=(rows, *parameter.shape[1:])), ranks) / experts


def _tied(parts: Sequence[StageProfile], plan: Plan, rank: int) -> Iterator[Exchange]:
    shard = plan.axes.shard
    for parameter, ranks in tied_parameters(parts, plan):
        if rank in ranks:
            padded = _padded_bytes(parameter, shard, plan.shares.uneven_shards)  # of the rank with most rows
            size = padded / shard if shard > 1 else float(parameter.bytes)
            yield Exchange("pipeline", "all_reduce", size, 1)


# ---- stages


def _cuts(
    local_stages: Iterable[int], stages: Sequence[StageProfile], plan: Plan, batch: float, runtime: Runtime, rounds: int
) -> Iterator[Exchange]:
    """Yields the activations sent to the next stage and the gradients sent to the previous one, unless that stage is on
    the same rank."""
    local_stages = set(local_stages)
    for number in local_stages if plan.axes.pipeline > 1 else ():
        sent, received = stages[number].sent.at(batch), stages[number].received.at(batch)
        for size_bytes, neighbor in ((sent, number + 1), (received, number - 1)):
            if neighbor not in local_stages:
                transfer = runtime.cut_transfer(size_bytes, plan)
                yield Exchange("pipeline", "point_to_point", transfer.sent_bytes, rounds)
                yield Exchange("tensor", "all_gather", transfer.gathered_behind_bytes, rounds)
        gathered_bytes = runtime.cut_transfer(sent, plan).gathered_before_bytes
        yield Exchange("tensor", "all_gather", gathered_bytes, rounds)


def _buffers(parts: list[StageProfile], plan: Plan) -> Iterator[Exchange]:
    for axis, size in mesh_sizes(plan.axes).items():
        if size > 1:
            yield Exchange(axis, "broadcast", float(sum(part.profile.buffer_bytes for part in parts)), 1)
