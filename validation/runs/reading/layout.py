"""Builds the `Plan` of a row from its axes, batches and pipeline cuts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes, Compute, Gradients, Memory, Modules, NumericsGroup, Pipeline
from validation.runs.case import NotCovered

ShardingLevel = Literal["optimizer", "gradients", "parameters"]
Recompute = Literal["none", "selective", "full"]
ImageLayout = Literal["contiguous", "channels_last"]
Exchange = Literal["all_gather", "ring"]
PRECISIONS: tuple[Literal["fp32", "tf32", "bf16", "fp16", "fp8"], ...] = ("fp32", "tf32", "bf16", "fp16", "fp8")


@dataclass(frozen=True)
class RunLayout:
    """How the ranks of a run are arranged.

    - `data`: the number of data-parallel ranks. Groups of `shard` of them shard what `sharding` says (None: nothing).
    - `chunks`: the number of stages on each pipeline rank.
    - `blocks`: the number of the model's blocks in each stage; empty without a pipeline.
    - `context` ranks divide the tokens of a sample; `expert` data ranks share the experts of a mixture."""

    data: int
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    sharding: ShardingLevel | None = None
    shard: int = 1
    blocks: tuple[int, ...] = ()
    context: int = 1
    expert: int = 1

    def axes(self) -> Axes:
        replicate = self.data // self.shard
        return Axes(
            replicate=replicate,
            shard=self.shard,
            context=self.context,
            tensor=self.tensor,
            pipeline=self.pipeline,
            expert=self.expert,
        )


def make_plan(
    layout: RunLayout,
    microbatches: int,
    precision: str,
    recompute: Recompute = "none",
    sequence: bool = False,
    loss: bool = False,
    bucket_bytes: int | None = None,
    layout_of_images: ImageLayout = "contiguous",
    attention_exchange: Exchange = "all_gather",
) -> Plan:
    """The plan of a run. Microbatches go through the pipeline, or are accumulated if there is no pipeline."""
    has_pipeline = layout.pipeline > 1
    plan_precision = next((name for name in PRECISIONS if name == precision), None)
    if plan_precision is None:
        raise NotCovered(f"a plan has no precision {precision}")
    return Plan(
        axes=layout.axes(),
        modules=Modules(
            sequence=sequence and layout.tensor > 1,
            loss=loss and layout.tensor > 1,
            attention_exchange=attention_exchange if layout.context > 1 else "all_gather",
        ),
        pipeline=Pipeline(
            schedule="interleaved_1f1b" if layout.chunks > 1 else "1f1b",
            microbatches=microbatches if has_pipeline else 1,
            cuts=cuts_after(layout.blocks) if has_pipeline else (),
        ),
        memory=Memory(
            sharding=layout.sharding or "parameters",
            recompute=recompute,
            accumulation=1 if has_pipeline else microbatches,
        ),
        numerics=NumericsGroup(precision=plan_precision),
        gradients=Gradients(bucket_bytes=bucket_bytes) if bucket_bytes else Gradients(),
        compute=Compute(layout=layout_of_images),
    )


def cuts_after(blocks: Sequence[int]) -> tuple[str, ...]:
    """The name of the last block of every stage except the last, after which the model is cut."""
    return tuple(f"blocks.{end - 1}" for end in list(accumulate(blocks))[:-1])


def even_blocks(layers: int, stages: int) -> tuple[int, ...]:
    """The number of blocks of each stage, as equal as possible."""
    if layers < stages:
        raise NotCovered("fewer blocks than stages")
    ends = [round(stage * layers / stages) for stage in range(stages + 1)]
    return tuple(end - begin for begin, end in pairwise(ends))


def blocks_by_cost(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """The number of blocks of each stage, cut where stages have equal costs. Costs are in blocks; the head, which is on
    the last stage, costs as much as `head` blocks."""
    share = (layers + head) / stages
    ends = [min(layers, int(stage * share * (1 + 1e-9))) for stage in range(stages)]
    counts = tuple(end - begin for begin, end in pairwise([*ends, layers]))
    if min(counts) < 1:
        raise NotCovered("a stage without blocks")
    return counts


def microbatches_of(global_batch: int, data: int, micro_batch: int) -> int:
    """The number of microbatches of a data-parallel rank."""
    if global_batch % (data * micro_batch):
        raise NotCovered("the microbatch does not divide a rank's share of the global batch")
    return global_batch // (data * micro_batch)
