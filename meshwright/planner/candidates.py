"""Which plans there are for a model on a cluster: factorizations of the ranks, and the choices within each.

    ranks  = pipeline × replicate × shard × tensor, tensor within a node and dividing every split group      layouts
             or tensor the ranks that branches live on: from 2 to as many as there are, without a pipeline     _apart
    batch  = (replicate × shard) × microbatches × samples of a microbatch                              microbatches
    stages = pipeline × stages of a rank, at most as many as the model can be cut into

A `Candidate` is the few numbers in which plans differ; the plan itself is written out (`plan_of`) for those only that
no bound excludes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, isqrt
from typing import Any, Literal

from meshwright.errors import InputError
from meshwright.plan import Axes, Compute, Memory, Modules, NumericsGroup, Pipeline, Plan
from meshwright.planner.outline import Outline
from meshwright.planner.placing import are_computed_again, beside, can_be_split, homes
from meshwright.planner.question import Question
from meshwright.simulator.pipeline.order import check_schedule

Recompute = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
Sharding = Literal["optimizer", "gradients", "parameters"]

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
_SHARDINGS: tuple[Sharding, ...] = ("optimizer", "gradients", "parameters")
_SCHEDULES: tuple[tuple[Schedule, int], ...] = (
    ("1f1b", 1),
    ("zero_bubble", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 3),
    ("interleaved_1f1b", 4),
    ("gpipe", 1),
)
_BUSY = 0.75  # of the devices, that a plan which cannot use all of them must


@dataclass(frozen=True)
class Layout:
    """How the ranks are divided. `wide`: a few huge layers are split over the replicate axis. `apart`: towers or heads
    live on different ranks of the tensor axis; with `beside` what they share is split along it, else it is whole."""

    tensor: int = 1
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    sharding: Sharding = "parameters"
    wide: bool = False
    apart: Literal["", "towers", "heads"] = ""
    beside: bool = False

    @property
    def axes(self) -> Axes:
        return Axes(replicate=self.replicate, shard=self.shard, tensor=self.tensor, pipeline=self.pipeline)

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.replicate * self.shard

    @property
    def samplers(self) -> int:
        """Among how many a batch is divided."""
        return self.replicate * self.shard

    @property
    def family(self) -> str:
        """The axes it uses, by name."""
        axes = [name for name in ("replicate", "shard", "tensor", "pipeline") if getattr(self, name) > 1]
        more = ["wide layers split"] * self.wide + [f"{self.apart} apart"] * bool(self.apart) + ["split"] * self.beside
        return " × ".join(axes + more) or "one rank"


@dataclass(frozen=True)
class Candidate:
    """`microbatches` of `batch` samples go through a rank in a step."""

    layout: Layout
    precision: str
    recompute: Recompute
    schedule: Schedule
    stages_per_rank: int
    microbatches: int
    batch: int

    @property
    def stages(self) -> int:
        return self.layout.pipeline * self.stages_per_rank

    @property
    def shape(self) -> tuple[Any, ...]:
        """All but the size of microbatches: larger ones need more memory."""
        return self.layout, self.precision, self.recompute, self.schedule, self.stages_per_rank

    @property
    def keeping_more(self) -> "Candidate | None":
        """The same with less computed again: faster, where it fits."""
        place = RECOMPUTES.index(self.recompute)
        return replace(self, recompute=RECOMPUTES[place - 1]) if place else None


def layouts(outline: Outline, question: Question) -> list[Layout]:
    """Those that use all devices; fewer where the batch is smaller, or where no axis divides it otherwise."""
    devices, batch = question.cluster.devices, question.global_batch
    found = list(_layouts(outline, question, devices))
    if batch < devices:
        for ranks in {devices - devices % batch, batch}:
            found += _layouts(outline, question, ranks)
    step = question.per_node if sum(node.number for node in question.cluster.nodes) > 1 else 1
    ranks = devices - step
    while not found and ranks >= devices * _BUSY:
        found = list(_layouts(outline, question, ranks))
        ranks -= step
    if not found:
        raise InputError(_indivisible(question))
    return list(dict.fromkeys(found))


def _layouts(outline: Outline, question: Question, ranks: int) -> Iterator[Layout]:
    batch = question.global_batch
    if question.even and 1 < ranks <= batch and gcd(ranks, batch) == 1:
        return  # stages and splits alone would leave every rank with the whole batch
    yield from _apart(outline, question, ranks)
    cuttable = sum(piece.cuttable for piece in outline.pieces)
    for tensor in divisors(gcd(question.per_node, outline.degree, ranks)):
        for pipeline in divisors(ranks // tensor):
            samplers = ranks // tensor // pipeline
            if pipeline > cuttable + 1 or samplers > batch or (question.even and batch % samplers):
                continue
            yield from _data_parallel(outline, question, Layout(tensor, pipeline), samplers)


def _apart(outline: Outline, question: Question, ranks: int) -> Iterator[Layout]:
    """Branches on ranks of a node, as many as have one each or fewer; what is left are replicas and shards."""
    for found in outline.placeable:
        modules = [module for branch in found.branches for module in branch]
        for tensor in divisors(gcd(question.per_node, ranks)):
            samplers = ranks // tensor
            if not 1 < tensor <= len(found.branches) or samplers > question.global_batch:
                continue
            if question.even and question.global_batch % samplers:
                continue
            layout = Layout(tensor, apart=found.kind)
            yield from _data_parallel(outline, question, layout, samplers)
            if can_be_split(outline, modules, tensor):
                yield from _data_parallel(outline, question, replace(layout, beside=True), samplers)


def _data_parallel(outline: Outline, question: Question, layout: Layout, samplers: int) -> Iterator[Layout]:
    """All replicas; some layers split over them; or sharded, over all of them or within nodes."""
    yield replace(layout, replicate=samplers)
    if samplers == 1:
        return
    alone = layout.tensor == 1 and layout.pipeline == 1
    if alone and outline.wide and outline.wide_splits(samplers):
        yield replace(layout, replicate=samplers, wide=True)
    inside = gcd(samplers, max(1, question.per_node // layout.tensor))
    for shard in sorted({samplers, inside} - {1}):
        for sharding in _SHARDINGS:
            yield replace(layout, shard=shard, replicate=samplers // shard, sharding=sharding)


def _indivisible(question: Question) -> str:
    batch, devices = question.global_batch, question.cluster.devices
    below, above = batch - batch % devices, batch - batch % devices + devices
    return (
        f"train.global_batch is {batch}, which no axis over the {devices} devices of '{question.cluster.name}' divides:"
        f" choose {f'{below} or ' if below else ''}{above}, or a cluster of {gcd(batch, devices)}"
    )


def microbatches(outline: Outline, layout: Layout, question: Question, precision: str) -> Iterator[list[Candidate]]:
    """Lists of candidates that need more and more memory, by what else they choose. Without a pipeline the largest
    microbatches are the fastest."""
    share = -(-question.global_batch // layout.samplers)
    sizes = [share] if question.joined else _sizes(share, question.even)
    for schedule, stages_per_rank in _SCHEDULES if layout.pipeline > 1 else _SCHEDULES[:1]:
        if layout.pipeline > 1 and layout.pipeline * stages_per_rank > sum(p.cuttable for p in outline.pieces) + 1:
            continue
        for recompute in _recomputes(outline, layout):
            yield [
                Candidate(layout, precision, recompute, schedule, stages_per_rank, -(-share // size), size)
                for size in sizes
                if layout.pipeline == 1 or _runs(schedule, layout.pipeline, stages_per_rank, -(-share // size))
            ]


def _recomputes(outline: Outline, layout: Layout) -> tuple[Recompute, ...]:
    if not any(piece.again for piece in outline.pieces):
        return RECOMPUTES[:1]
    return RECOMPUTES[:1] if layout.apart and are_computed_again(outline, layout.apart) else RECOMPUTES


def _sizes(share: int, even: bool) -> list[int]:
    """Powers of two, and the whole share."""
    powers = [1 << power for power in range(share.bit_length())]
    return sorted({size for size in powers if not even or share % size == 0} | {share})


def _runs(schedule: str, ranks: int, stages_per_rank: int, count: int) -> bool:
    if schedule == "gpipe" and count >= 4 * ranks:
        return False  # it keeps them all: 1f1b is as fast by then
    try:
        check_schedule(schedule, ranks, stages_per_rank, count)
    except InputError:
        return False
    return True


def plan_of(candidate: Candidate, outline: Outline, question: Question) -> Plan:
    """Written out. The candidate's stages must exist."""
    layout = candidate.layout
    pipelined = layout.pipeline > 1
    cuts = outline.cuts(candidate.stages, candidate.recompute) if pipelined else ()
    assert cuts is not None
    images = outline.has_convolutions and not question.exact
    return Plan(
        axes=layout.axes,
        modules=_modules(layout, outline, question),
        pipeline=Pipeline(
            schedule=candidate.schedule,
            microbatches=candidate.microbatches if pipelined else 1,
            cuts=tuple(outline.pieces[piece].name for piece in cuts),
        ),
        memory=Memory(
            sharding=layout.sharding,
            recompute=candidate.recompute,
            accumulation=1 if pipelined else candidate.microbatches,
        ),
        numerics=NumericsGroup.model_validate({"precision": candidate.precision}),
        compute=Compute(layout="channels_last" if images else "contiguous"),
    )


def _modules(layout: Layout, outline: Outline, question: Question) -> Modules:
    if layout.apart:
        where = homes(outline, question, layout.axes, layout.apart)
        return Modules(splits=beside(outline, where, layout.tensor, layout.beside), branches=where)
    return Modules(
        splits=outline.wide_splits(layout.replicate) if layout.wide else {},
        sequence=layout.tensor > 1 and outline.has_sequence,
        loss=layout.tensor > 1 and outline.has_vocabulary,
    )


def divisors(number: int) -> list[int]:
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
