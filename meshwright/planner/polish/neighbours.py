"""The neighbours of a point: points that differ in one field, or in two fields that are worth changing together.

microbatches   the next and the second next number, up and down, and a single one
recomputation  the other levels, with as many microbatches and with fewer or more
compute        what is compiled, CUDA graphs, the fused optimizer, a loss in chunks, image layouts, all with as many
               microbatches; chunks also with fewer microbatches
offload        of the optimizer, with as many microbatches, fewer of them and less recomputation
sharding       the other levels
pipeline       the other schedules
axes           a part of one axis moved to another
gradients      other sizes of buckets; casts of weights
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from meshwright.numbers.limits import MOST_CHUNKS
from meshwright.plan_fields.groups import BUCKET_BYTES, Compute
from meshwright.planner.candidates import (
    RECOMPUTES,
    SHARDINGS,
    AxisSizes,
    Candidate,
    candidate_series,
)
from meshwright.planner.compute_variants import BUCKETS, CHUNK_TOKENS, ModelTraits, compilations
from meshwright.planner.inputs import PlanningInputs, fp32_image_kernels
from meshwright.planner.model_summary import ModelSummary
from meshwright.planner.polish.point import ComputeFields, Point

_STEPS = (-1, 1, -2, 2)


@dataclass
class Neighbours:
    """Lists neighbours for one model on one cluster. `sizes` are the ways to divide the devices into axes, and
    `can_run` says whether a point is a plan that can be run."""

    summary: ModelSummary
    inputs: PlanningInputs
    traits: ModelTraits
    sizes: Sequence[AxisSizes]
    can_run: Callable[[Point], bool] = lambda _: True

    def __post_init__(self) -> None:
        self._usual: dict[tuple[AxisSizes, str], dict[str, Any]] = {}
        self._series: dict[tuple[AxisSizes, str], list[list[Candidate]]] = {}
        self._known_sizes = set(self.sizes)

    def series(self, sizes: AxisSizes, precision: str) -> list[list[Candidate]]:
        """The candidates with these axes: a list for each schedule and level of recomputation, with growing
        microbatches."""
        key = (sizes, precision)
        if key not in self._series:
            self._series[key] = [s for s in candidate_series(self.summary, sizes, self.inputs, precision) if s]
        return self._series[key]

    def like(self, candidate: Candidate, **changes: Any) -> list[Candidate]:
        """The candidates that are equal except for their microbatches."""
        other = replace(candidate, **changes)
        for series in self.series(other.sizes, other.precision):
            if series[0].without_microbatch == other.without_microbatch:
                return series
        return []

    def with_samples(self, candidate: Candidate, step: int = 0, **changes: Any) -> Candidate | None:
        """The candidate with these changes, whose microbatches are the nearest that are not larger, or are larger by so
        many `step`s; None if there is none."""
        series = self.like(candidate, **changes)
        at_most = [index for index, c in enumerate(series) if c.microbatch_samples <= candidate.microbatch_samples]
        index = (at_most[-1] if at_most else 0) + step
        return series[index] if series and 0 <= index < len(series) else None

    def groups(self, point: Point, *, within: bool = False) -> Iterator[Callable[[Point], Iterator[Point]]]:
        """Yields functions that list the neighbours of a point in some of its fields, those that gain most first; with
        `within`, those with the same axes and sharding, and nothing in CPU memory that was not before."""
        yield self._microbatches
        yield self._computes
        yield self._recomputes
        yield self._chunks
        yield self._exchanges
        if within:
            return
        yield self._moves
        yield self._offloads

    def _moves(self, point: Point) -> Iterator[Point]:
        """With other axes, the code is compiled as it is mostly the fastest with them."""
        for sizes in self._other_sizes(point.candidate.sizes):
            for other in self._on(sizes, point.candidate):
                fields = self._usual_compilation(other)
                moved = replace(point, candidate=other, compute=with_fields(point.compute, fields))
                yield replace(moved, cast="operators") if sizes.shard == 1 else moved

    def _microbatches(self, point: Point) -> Iterator[Point]:
        """The next microbatches and the largest one; in a pipeline, also other schedules with about this one."""
        candidate = point.candidate
        own_series = self.like(candidate)
        index = own_series.index(candidate) if candidate in own_series else 0
        to_the_last = len(own_series) - 1 - index
        for step in (*_STEPS, to_the_last):
            if 0 <= index + step < len(own_series):
                yield replace(point, candidate=own_series[index + step])
        if candidate.sizes.pipeline > 1:
            yield from self._schedules(point)

    def _schedules(self, point: Point) -> Iterator[Point]:
        candidate = point.candidate
        for series in self.series(candidate.sizes, candidate.precision):
            if series[0].recompute == candidate.recompute:
                fields = {name: getattr(series[0], name) for name in ("schedule", "stages_per_rank")}
                for step in (0, -1, 1):
                    if other := self.with_samples(candidate, step, **fields):
                        yield replace(point, candidate=other)

    def _recomputes(self, point: Point) -> Iterator[Point]:
        for recompute in RECOMPUTES:
            if recompute != point.candidate.recompute:
                for step in (0, *_STEPS):
                    if other := self.with_samples(point.candidate, step, recompute=recompute):
                        yield replace(point, candidate=other)

    def _on(self, sizes: AxisSizes, candidate: Candidate) -> Iterator[Candidate]:
        for step in (0, 1, -1):
            schedule: dict[str, Any] = {}
            if (sizes.pipeline > 1) != (candidate.sizes.pipeline > 1):
                schedule = {"schedule": "1f1b", "stages_per_rank": 1}
            if other := self.with_samples(candidate, step, sizes=sizes, **schedule):
                yield other

    def _other_sizes(self, sizes: AxisSizes) -> Iterator[AxisSizes]:
        """Yields the axes with another sharding, and those in which a part of one axis belongs to another axis."""
        for sharding in SHARDINGS if sizes.shard > 1 else ():
            if sharding != sizes.sharding:
                yield from self._known(replace(sizes, sharding=sharding))
        names = ("replicate", "shard", "tensor", "pipeline", "context")
        for source in names:
            size = getattr(sizes, source)
            for target in names:
                for factor in sorted({2, 3, size}):
                    if target != source and factor > 1 and size % factor == 0:
                        moved = {source: size // factor, target: getattr(sizes, target) * factor}
                        for sharding in SHARDINGS if target == "shard" and sizes.shard == 1 else (sizes.sharding,):
                            yield from self._known(replace(sizes, sharding=sharding, **moved))

    def _known(self, sizes: AxisSizes) -> Iterator[AxisSizes]:
        if sizes.shard == 1:
            sizes = replace(sizes, sharding="parameters")
        if sizes in self._known_sizes:
            yield sizes

    # ---- compute

    def compiled(self, sizes: AxisSizes, recompute: str) -> list[dict[str, Any]]:
        """What can be compiled with these axes, with CUDA graphs and without; the least first."""
        return compilations(sizes, recompute, self.inputs, self.traits.blocks)

    def usual(self, candidate: Candidate) -> Point:
        """The candidate with the fields of `compute` that are mostly the fastest."""
        fields = self._usual_compilation(candidate)
        if self.inputs.can_fuse_optimizer and self.inputs.allow != "same":
            fields = {**fields, "fused_optimizer": True}
        return Point(candidate, with_fields((), fields), offload=self.inputs.offload)

    def _usual_compilation(self, candidate: Candidate) -> dict[str, Any]:
        """What is mostly the fastest of what can be compiled of this model with the axes of the candidate."""
        key = (candidate.sizes, candidate.recompute)
        if key not in self._usual:
            choices = self.compiled(*key)
            can_run = (
                fields for fields in reversed(choices) if self.can_run(Point(candidate, with_fields((), fields)))
            )
            self._usual[key] = next(can_run, choices[-1])
        return self._usual[key]

    def _computes(self, point: Point) -> Iterator[Point]:
        candidate = point.candidate
        if self.inputs.allow == "same":
            return
        for fields in self.compiled(candidate.sizes, candidate.recompute):
            yield replace(point, compute=with_fields(point.compute, fields))
        if self.inputs.can_fuse_optimizer:
            fused = not dict(point.compute).get("fused_optimizer", False)
            yield replace(point, compute=with_fields(point.compute, {"fused_optimizer": fused}))
        if self.traits.images and candidate.precision == "fp32":
            for kernels in ({"layout": "contiguous"}, *fp32_image_kernels(self.inputs)):
                both = {"layout": "contiguous", "convolutions": "default", **kernels}
                yield replace(point, compute=with_fields(point.compute, both))

    def _chunks(self, point: Point) -> Iterator[Point]:
        sizes, has_chunks = point.candidate.sizes, "loss_chunks" in dict(point.compute)
        if not self.traits.loss_tokens or sizes.tensor > 1 or sizes.pipeline > 1 or sizes.splits_wide_layers:
            return
        if self.inputs.allow == "same":
            return
        series = self.like(point.candidate)
        nearest = [self.with_samples(point.candidate, step) for step in (0, 1, 2)]
        for other in dict.fromkeys((*nearest, *series[-1:])):
            if other is None:
                continue
            for count in chunk_counts(other, self.traits):
                yield replace(point, candidate=other, compute=with_fields(point.compute, {"loss_chunks": count}))
        if has_chunks:
            yield replace(point, compute=with_fields(point.compute, {"loss_chunks": 1}))

    def _exchanges(self, point: Point) -> Iterator[Point]:
        sizes = point.candidate.sizes
        if sizes.replicate > 1 and sizes.shard == 1:
            for size in (BUCKET_BYTES, *BUCKETS):
                yield replace(point, bucket_bytes=size)
        precision = point.candidate.precision
        if sizes.shard > 1 and sizes.expert == 1 and precision in ("bf16", "fp16") and self.inputs.allow == "changes":
            for cast in ("operators", "weights"):
                yield replace(point, cast=cast)

    def _offloads(self, point: Point) -> Iterator[Point]:
        if self.inputs.cluster.kind != "cuda" or self.inputs.allow == "same" or self.inputs.offload != "none":
            return
        if not all(node.device.host_bandwidth_bytes_per_s for node in self.inputs.cluster.nodes):
            return
        offload = "none" if point.offload == "optimizer" else "optimizer"
        steps, levels = (0, 1, 2) if offload == "optimizer" else (0, -1, -2), RECOMPUTES
        compute = with_fields(point.compute, {"cuda_graphs": False}) if offload == "optimizer" else point.compute
        for step in steps:
            for recompute in levels if offload == "optimizer" else (point.candidate.recompute,):
                if other := self.with_samples(point.candidate, step, recompute=recompute):
                    yield replace(point, candidate=other, compute=compute, offload=offload)


def chunk_counts(candidate: Candidate, traits: ModelTraits) -> list[int]:
    """The numbers of chunks of the loss that are tried, the fewest first."""
    tokens = ceil(candidate.microbatch_samples) * traits.loss_tokens
    counts = dict.fromkeys(min(ceil(tokens / size), MOST_CHUNKS) for size in CHUNK_TOKENS)
    return [count for count in counts if count > 1]


def with_fields(compute: ComputeFields, fields: dict[str, Any]) -> ComputeFields:
    """The fields without those that have their defaults."""
    defaults = Compute.model_fields
    named = {**dict(compute), **fields}
    return tuple(sorted((name, value) for name, value in named.items() if value != defaults[name].default))
