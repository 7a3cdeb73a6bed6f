"""The axes, batches and cuts of a row, and the `Plan` they make."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from meshwright.plan import Axes, Compute, Gradients, Memory, Modules, NumericsGroup, Pipeline, Plan
from validation.runs.case import NotCovered

ShardingLevel = Literal["optimizer", "gradients", "parameters"]
Recompute = Literal["none", "selective", "full"]
ImageLayout = Literal["contiguous", "channels_last"]
PRECISIONS: tuple[Literal["fp32", "tf32", "bf16", "fp16"], ...] = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class RunLayout:
    """How ranks are laid out. Of `data` parallel ranks, `shard` divide what `sharding` says (None: nothing).
    `chunks` are stages a pipeline rank; `blocks` of the model in each stage."""

    data: int
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    sharding: ShardingLevel | None = None
    shard: int = 1
    blocks: tuple[int, ...] = ()

    def axes(self) -> Axes:
        replicate = self.data // self.shard
        return Axes(replicate=replicate, shard=self.shard, tensor=self.tensor, pipeline=self.pipeline)


def make_plan(
    layout: RunLayout,
    microbatches: int,
    precision: str,
    recompute: Recompute = "none",
    sequence: bool = False,
    loss: bool = False,
    bucket_bytes: int | None = None,
    layout_of_images: ImageLayout = "contiguous",
) -> Plan:
    """Microbatches go through the pipeline where there is one, and are accumulated where there is none."""
    cut = layout.pipeline > 1
    known = next((name for name in PRECISIONS if name == precision), None)
    if known is None:
        raise NotCovered(f"a plan has no precision {precision}")
    return Plan(
        axes=layout.axes(),
        modules=Modules(sequence=sequence and layout.tensor > 1, loss=loss and layout.tensor > 1),
        pipeline=Pipeline(
            schedule="interleaved_1f1b" if layout.chunks > 1 else "1f1b",
            microbatches=microbatches if cut else 1,
            cuts=cuts_behind(layout.blocks) if cut else (),
        ),
        memory=Memory(
            sharding=layout.sharding or "parameters", recompute=recompute, accumulation=1 if cut else microbatches
        ),
        numerics=NumericsGroup(precision=known),
        gradients=Gradients(bucket_bytes=bucket_bytes) if bucket_bytes else Gradients(),
        compute=Compute(layout=layout_of_images),
    )


def cuts_behind(blocks: Sequence[int]) -> tuple[str, ...]:
    """The last block of every stage but the last."""
    return tuple(f"blocks.{end - 1}" for end in list(accumulate(blocks))[:-1])


def even_blocks(layers: int, stages: int) -> tuple[int, ...]:
    """As even as can be."""
    if layers < stages:
        raise NotCovered("fewer blocks than stages")
    ends = [round(stage * layers / stages) for stage in range(stages + 1)]
    return tuple(end - begin for begin, end in pairwise(ends))


def blocks_by_cost(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """Each stage as many as end within its share of all costs, in blocks: the last one's head counts as `head`."""
    share = (layers + head) / stages
    ends = [min(layers, int(stage * share * (1 + 1e-9))) for stage in range(stages)]
    counts = tuple(end - begin for begin, end in pairwise([*ends, layers]))
    if min(counts) < 1:
        raise NotCovered("a stage without blocks")
    return counts


def microbatches_of(global_batch: int, data: int, micro_batch: int) -> int:
    if global_batch % (data * micro_batch):
        raise NotCovered("the microbatch does not divide a rank's share of the global batch")
    return global_batch // (data * micro_batch)
