"""Lists the plans that are possible for a model on a cluster: factorizations of the ranks, and the choices within each.

    ranks  = pipeline × replicate × shard × context × tensor                                    possible_axis_sizes
             Data ranks that do not divide the batch get shares that differ by one sample                    _shares
             Experts are divided over ranks of the shard axis, or without one of the replicate axis  _with_data_axes
             The tensor axis lies within a node, and its size divides the degree of every split group; or it
             has at most as many ranks as there are branches, which are placed on different ranks, and there
             is no pipeline                                                                     _with_placed_branches
    batch  = (replicate × shard) × microbatches × samples of a microbatch                       candidate_series
    stages = pipeline × stages of a rank, at most as many as the model can be cut into

A `Candidate` has the few numbers in which plans differ. The complete plan is created (`plan_of`) only if it is needed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes, Compute, Memory, Modules, NumericsGroup, Pipeline, Shares
from meshwright.planner.branch_placement import (
    branch_ranks,
    can_be_split,
    lie_in_recomputed_blocks,
    shared_layer_splits,
)
from meshwright.planner.constraints.apply import applied
from meshwright.planner.constraints.contradictions import no_plan_keeps
from meshwright.planner.constraints.space import (
    divisors,
    fixed_or,
    keeps_axes,
    microbatch_counts,
    schedules,
    shard_sizes,
)
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.model_summary import ModelSummary
from meshwright.simulator.data_ranks import groups_are_alike
from meshwright.simulator.pipeline.order import check_schedule

Recompute = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"]
Sharding = Literal["optimizer", "gradients", "parameters"]

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
SHARDINGS: tuple[Sharding, ...] = ("optimizer", "gradients", "parameters")
_SCHEDULES: tuple[tuple[Schedule, int], ...] = (
    ("1f1b", 1),
    ("zero_bubble", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 3),
    ("interleaved_1f1b", 4),
    ("gpipe", 1),
)
_SHORTEST_SEQUENCE, _FEWEST_TOKENS = 16_384, 4_096  # chosen: sequences that are divided, and the tokens of a rank
_LEAST_USED = 0.75  # chosen: a power of two below the devices, or what divides the batch, is tried from this share on


@dataclass(frozen=True)
class AxisSizes:
    """One way to divide the ranks into axes.

    sharding              what the shard axis divides
    splits_wide_layers    a few large layers are split over the replicate axis
    placed_branches       the towers or heads that are placed on different ranks of the tensor axis; "" for none
    splits_shared_layers  with placed branches: layers outside of them are split over the tensor axis, else replicated
    expert                data ranks that share the experts of a mixture
    """

    tensor: int = 1
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    sharding: Sharding = "parameters"
    splits_wide_layers: bool = False
    placed_branches: Literal["", "towers", "heads"] = ""
    splits_shared_layers: bool = False
    expert: int = 1

    @property
    def axes(self) -> Axes:
        names = ("replicate", "shard", "context", "tensor", "pipeline", "expert")
        return Axes(**{name: getattr(self, name) for name in names})

    @property
    def ranks(self) -> int:
        return self.context * self.tensor * self.pipeline * self.replicate * self.shard

    @property
    def without_context(self) -> "AxisSizes":
        """The sizes of a plan in which ranks exchange weights and gradients as in this one (simulator/context.py)."""
        if self.context == 1:
            return self
        joined = "shard" if self.shard > 1 else "replicate"
        return replace(self, context=1, **{joined: getattr(self, joined) * self.context})

    @property
    def shape(self) -> tuple[Any, ...]:
        """Everything but how many of the data ranks are shards, and what these divide."""
        placed = self.splits_wide_layers, self.placed_branches, self.splits_shared_layers
        return self.data_ranks, self.shard > 1, self.tensor, self.pipeline, self.context, self.expert, *placed

    @property
    def data_ranks(self) -> int:
        """The number of ranks, or groups of ranks, among which a batch is divided."""
        return self.replicate * self.shard

    @property
    def family(self) -> tuple[str, ...]:
        """The kind of plan, as a tuple of names: the axes with more than one rank, whether wide layers are split, and
        which branches are placed."""
        axes = [name for name in ("replicate", "shard", "context", "tensor", "pipeline") if getattr(self, name) > 1]
        wide = ["wide layers"] * self.splits_wide_layers
        placed = [self.placed_branches] * bool(self.placed_branches) + ["shared layers"] * self.splits_shared_layers
        return (*axes, *["expert"] * (self.expert > 1), *wide, *placed)


@dataclass(frozen=True)
class Candidate:
    """The choices of one plan. In a step, a rank processes `microbatches` microbatches of `microbatch_samples` samples
    each."""

    sizes: AxisSizes
    precision: str
    recompute: Recompute
    schedule: Schedule
    stages_per_rank: int
    microbatches: int
    microbatch_samples: float

    @property
    def without_context(self) -> "Candidate":
        """A candidate without a context axis whose ranks compute and keep as much: part of the samples instead of part
        of their tokens."""
        context = self.sizes.context
        if context == 1:
            return self
        return replace(self, sizes=self.sizes.without_context, microbatch_samples=self.microbatch_samples / context)

    @property
    def activation_parts(self) -> int:
        """The number of ranks that divide the activations of a sample."""
        return self.sizes.tensor * self.sizes.context

    @property
    def stages(self) -> int:
        return self.sizes.pipeline * self.stages_per_rank

    @property
    def without_microbatch(self) -> tuple[Any, ...]:
        """All choices except those about microbatches. Of two candidates that are equal in these, the one with larger
        microbatches needs more memory."""
        return self.sizes, self.precision, self.recompute, self.schedule, self.stages_per_rank

    @property
    def with_less_recompute(self) -> "Candidate | None":
        """The same candidate with the next lower level of recomputation, which is faster if it fits; None if nothing is
        recomputed."""
        level = RECOMPUTES.index(self.recompute)
        return replace(self, recompute=RECOMPUTES[level - 1]) if level else None


def possible_axis_sizes(summary: ModelSummary, inputs: PlanningInputs) -> list[AxisSizes]:
    """Returns every way to divide the devices into axes. Some devices stay unused if the batch has fewer samples than
    there are devices, if no axes over all devices divide the batch, or if the number of machines, or of devices of one
    machine, is a little above a power of two. Raises an `InputError` if there is no way."""
    devices = min(inputs.cluster.device_count, inputs.most_ranks or inputs.cluster.device_count)
    all_sizes = list(_sizes_for(summary, inputs, devices))
    for ranks in _fewer(inputs, devices):
        all_sizes += _sizes_for(summary, inputs, ranks)
    ranks = devices - _unit(inputs)
    while not all_sizes and ranks >= devices * _LEAST_USED:
        all_sizes = list(_sizes_for(summary, inputs, ranks))
        ranks -= _unit(inputs)
    kept = [sizes for sizes in dict.fromkeys(all_sizes) if keeps_axes(inputs, sizes)]
    if not kept:
        raise InputError(no_plan_keeps(inputs))
    return [sizes for sizes in kept if groups_are_alike(sizes.axes, inputs.cluster)] or kept


def _fewer(inputs: PlanningInputs, devices: int) -> list[int]:
    """Numbers of ranks below that of the devices: those for a batch with too few samples for more data ranks, and a
    power of two, over which the quickest algorithms of an all-reduce combine gradients."""
    batch = inputs.global_batch
    ranks: set[int] = set()
    if batch < devices:
        ranks = {batch << power for power in range(devices.bit_length())} | {devices - devices % batch}
    if inputs.cluster.is_uniform:
        unit = _unit(inputs) if devices > _unit(inputs) else 1
        power = unit << ((devices // unit).bit_length() - 1)
        ranks |= {power} if power >= _LEAST_USED * devices else set()
    return sorted(number for number in ranks if number < devices)


def _unit(inputs: PlanningInputs) -> int:
    """The number of devices by which more or fewer are used: those of a machine if there are several machines."""
    return inputs.devices_per_node if sum(node.number for node in inputs.cluster.nodes) > 1 else 1


def _sizes_for(summary: ModelSummary, inputs: PlanningInputs, ranks: int) -> Iterator[AxisSizes]:
    batch = inputs.global_batch
    yield from _with_placed_branches(summary, inputs, ranks)
    cuts = sum(piece.cuttable for piece in summary.pieces)
    degree = ranks if inputs.constraints.fixed.get("modules.splits") else gcd(summary.tensor_degree, ranks)
    for tensor in fixed_or(inputs, "tensor", divisors(degree), degree):
        others = ranks // tensor
        for pipeline in fixed_or(inputs, "pipeline", divisors(others), others):
            sizes = _context_sizes(summary, others // pipeline)
            for context in fixed_or(inputs, "context", sizes, others // pipeline):
                data_ranks = others // pipeline // context
                if pipeline > cuts + 1 or data_ranks > batch:
                    continue
                yield from _with_data_axes(summary, inputs, AxisSizes(tensor, pipeline, context=context), data_ranks)


def _context_sizes(summary: ModelSummary, ranks: int) -> list[int]:
    """The sizes of the context axis that are tried: powers of two, for sequences that are long enough. With fewer
    tokens, samples are as good to divide, and the search would take longer."""
    length = summary.sequence_length
    largest = length // _FEWEST_TOKENS if length >= _SHORTEST_SEQUENCE else 1
    return [size for size in divisors(ranks) if size <= max(1, largest) and size & (size - 1) == 0]


def _with_placed_branches(summary: ModelSummary, inputs: PlanningInputs, ranks: int) -> Iterator[AxisSizes]:
    """Yields sizes with branches on a tensor axis within a node, of at most as many ranks as there are branches. The
    other axes are replicas and shards."""
    fixed = inputs.constraints.fixed
    if fixed.keys() & {"modules.branches", "modules.splits"} or fixed.get("axes.pipeline", 1) > 1:
        return
    for group in summary.branch_groups:
        modules = [module for branch in group.branches for module in branch]
        for tensor in fixed_or(inputs, "tensor", divisors(gcd(inputs.devices_per_node, ranks)), ranks):
            data_ranks = ranks // tensor
            if not 1 < tensor <= len(group.branches) or data_ranks > inputs.global_batch:
                continue
            sizes = AxisSizes(tensor, placed_branches=group.kind)
            yield from _with_data_axes(summary, inputs, sizes, data_ranks)
            if can_be_split(summary, modules, tensor):
                yield from _with_data_axes(summary, inputs, replace(sizes, splits_shared_layers=True), data_ranks)


def _with_data_axes(
    summary: ModelSummary, inputs: PlanningInputs, sizes: AxisSizes, data_ranks: int
) -> Iterator[AxisSizes]:
    """Yields the sizes of `_with_replicas_or_shards`, and those with experts divided over data ranks: over as many as
    possible within a node, and over as many as possible."""
    fixed = inputs.constraints.fixed.get("axes.expert")
    for divided in _with_replicas_or_shards(summary, inputs, sizes, data_ranks):
        if fixed in (None, 1):
            yield divided
        is_other = divided.splits_wide_layers or divided.placed_branches
        if is_other or inputs.offload == "parameters":
            continue
        over = divided.shard if divided.shard > 1 else divided.replicate
        most = gcd(summary.expert_degree, over)
        within_node = gcd(most, max(1, inputs.devices_per_node // sizes.tensor))
        for ranks in fixed_or(inputs, "expert", sorted({most, within_node} - {1}), most):
            if ranks > 1 and (not summary.has_listed_experts or _can_divide_list(divided, ranks)):
                yield replace(divided, expert=ranks)


def _can_divide_list(sizes: AxisSizes, ranks: int) -> bool:
    """Whether a list of experts, of which ranks hold different modules, can be divided over `ranks` data ranks."""
    is_sharded = sizes.shard > 1
    return sizes.pipeline == 1 and (not is_sharded or (sizes.shard == ranks and sizes.context == 1))


def _with_replicas_or_shards(
    summary: ModelSummary, inputs: PlanningInputs, sizes: AxisSizes, data_ranks: int
) -> Iterator[AxisSizes]:
    """Yields `sizes` with the data ranks as replicas, as replicas with the wide layers split, or as shards. Shards
    extend over all data ranks, over those within a node, or over the largest power of two that divides them. Only
    shards of parameters can be in CPU memory."""
    only_shards, fixed = inputs.offload == "parameters", inputs.constraints.fixed
    can_replicate = fixed.get("axes.shard", 1) == 1 and fixed.get("axes.replicate", data_ranks) == data_ranks
    if not only_shards and can_replicate:
        yield replace(sizes, replicate=data_ranks)
    if data_ranks == 1:
        return
    replicate_only = sizes.context == sizes.tensor == sizes.pipeline == 1 and not only_shards and can_replicate
    if replicate_only and "modules.splits" not in fixed and summary.wide_layers and summary.wide_splits(data_ranks):
        yield replace(sizes, replicate=data_ranks, splits_wide_layers=True)
    within_node = gcd(data_ranks, max(1, inputs.devices_per_node // sizes.tensor))
    power_of_two = data_ranks & -data_ranks  # over such a number of machines, collectives are the quickest
    for shard in shard_sizes(inputs, data_ranks, sorted({data_ranks, within_node, power_of_two} - {1})):
        for sharding in SHARDINGS if not only_shards else SHARDINGS[-1:]:
            if fixed.get("memory.sharding", sharding) != sharding:
                continue
            yield replace(sizes, shard=shard, replicate=data_ranks // shard, sharding=sharding)


def candidate_series(
    summary: ModelSummary, sizes: AxisSizes, inputs: PlanningInputs, precision: str
) -> Iterator[list[Candidate]]:
    """Yields one list of candidates for each schedule and level of recomputation. The candidates of a list differ only
    in the size of their microbatches, and each needs more memory than the one before. Without a pipeline the last is
    the fastest."""
    pipelined = sizes.pipeline > 1
    fixed = inputs.constraints.fixed
    is_fixed = "pipeline.schedule" in fixed

    is_even = inputs.even_shares and inputs.global_batch % sizes.data_ranks == 0
    largest_share = -(-inputs.global_batch // sizes.data_ranks)
    counts = microbatch_counts(inputs, largest_share, pipelined, is_even)
    for schedule, stages_per_rank in schedules(inputs, sizes.pipeline, _SCHEDULES) if pipelined else _SCHEDULES[:1]:
        if sizes.expert > 1 and schedule == "zero_bubble":  # its backward pass in two parts would exchange tokens twice
            continue
        if pipelined and sizes.pipeline * stages_per_rank > sum(p.cuttable for p in summary.pieces) + 1:
            continue
        for recompute in _recompute_levels(summary, sizes):
            if fixed.get("memory.recompute", recompute) != recompute:
                continue
            yield [
                Candidate(sizes, precision, recompute, schedule, stages_per_rank, count, batch)
                for batch, count in counts.items()
                if sizes.data_ranks * count <= inputs.global_batch
                and (not pipelined or _is_useful(schedule, sizes.pipeline, stages_per_rank, count, is_fixed))
            ]


def _recompute_levels(summary: ModelSummary, sizes: AxisSizes) -> tuple[Recompute, ...]:
    if not any(piece.recomputable for piece in summary.pieces):
        return RECOMPUTES[:1]
    kind = sizes.placed_branches
    return RECOMPUTES[:1] if kind and lie_in_recomputed_blocks(summary, kind) else RECOMPUTES


def _is_useful(schedule: str, ranks: int, stages_per_rank: int, count: int, is_fixed: bool) -> bool:
    """Whether a schedule can run `count` microbatches, and, unless it `is_fixed`, is not in all respects worse than
    another schedule."""
    if schedule == "gpipe" and not is_fixed and count >= 4 * ranks:
        # GPipe keeps the activations of all microbatches, and 1f1b takes as long except for transfers.
        # The limit of four microbatches per rank is chosen, not measured.
        return False
    try:
        check_schedule(schedule, ranks, stages_per_rank, count)
    except InputError:
        return False
    return True


def plan_of(candidate: Candidate, summary: ModelSummary, inputs: PlanningInputs) -> Plan:
    """Returns the complete plan of a candidate, with the fields that the constraints fix. The model must be cuttable
    into the candidate's number of stages."""
    sizes = candidate.sizes
    pipelined = sizes.pipeline > 1
    cuts = summary.cuts(candidate.stages, candidate.recompute) if pipelined else ()
    assert cuts is not None
    plan = Plan(
        axes=sizes.axes,
        modules=_modules(sizes, summary, inputs),
        pipeline=Pipeline(
            schedule=candidate.schedule,
            microbatches=candidate.microbatches if pipelined else 1,
            cuts=tuple(summary.pieces[piece].name for piece in cuts),
        ),
        memory=Memory(
            sharding=sizes.sharding,
            recompute=candidate.recompute,
            accumulation=1 if pipelined else candidate.microbatches,
            offload=inputs.offload,
        ),
        numerics=NumericsGroup.model_validate({"precision": candidate.precision}),
        compute=Compute(layout=summary.memory_layout),
        shares=_shares(sizes.data_ranks, inputs),
    )
    return applied(plan, inputs.constraints)


def _shares(data_ranks: int, inputs: PlanningInputs) -> Shares:
    """Shares that differ by one sample, where the data ranks do not divide the batch and a plan has to say so."""
    each, more = divmod(inputs.global_batch, data_ranks)
    if not more or not inputs.even_shares or "shares.samples" in inputs.constraints.fixed:
        return Shares()
    return Shares(samples=(each + 1,) * more + (each,) * (data_ranks - more))


def _modules(sizes: AxisSizes, summary: ModelSummary, inputs: PlanningInputs) -> Modules:
    if sizes.placed_branches:
        ranks = branch_ranks(summary, inputs, sizes.axes, sizes.placed_branches)
        splits = shared_layer_splits(summary, ranks, sizes.tensor, sizes.splits_shared_layers)
        return Modules(splits=splits, branches=ranks)
    return Modules(
        splits=summary.wide_splits(sizes.replicate) if sizes.splits_wide_layers else {},
        sequence=sizes.tensor > 1 and summary.has_sequence,
        loss=sizes.tensor > 1 and summary.has_vocabulary,
        attention_exchange="ring" if sizes.context > 1 else "all_gather",
    )
