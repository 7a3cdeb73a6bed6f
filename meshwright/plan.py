"""`Plan`: how to train, every choice spelled out. The vocabulary that planning and execution share; no torch.

Each field is marked with what it does to the numbers: `same` (the training is equal up to summation order),
`rounding` (other kernels, other last bits) or `changes` (another arithmetic).
"""

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

Numerics = Literal["same", "rounding", "changes"]
Algorithm = Literal["auto", "native", "ring", "tree", "halving_doubling", "two_level", "shared_memory"]
MIB = 2**20
# From the axis whose ranks lie furthest apart to the one whose ranks are neighbours: those that exchange the most.
MESH_ORDER = ("pipeline", "replicate", "shard", "tensor")
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "zbv": 2}  # the other schedules run any number


def _choice(default: Any, numerics: Numerics, **limits: Any) -> Any:
    return Field(default=default, json_schema_extra={"numerics": numerics}, **limits)


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Axes(_Group):
    """The mesh of training ranks: the product of the axes is their number."""

    replicate: PositiveInt = _choice(1, "same")
    shard: PositiveInt = _choice(1, "same")
    tensor: PositiveInt = _choice(1, "same")
    pipeline: PositiveInt = _choice(1, "same")


class Split(_Group):
    """One layer's split. Over the `replicate` axis the batch is gathered before the layer and scattered behind it,
    so a few huge layers are divided while the rest of the model is replicated."""

    kind: Literal["column", "row", "vocabulary", "none"]
    axis: Literal["tensor", "replicate"] = "tensor"


class Modules(_Group):
    """`splits` by module name, where `*` stands for one part of it; what is not named is split along the tensor axis
    as the model's structure says. `sequence`: between the split layers activations are divided along the sequence.
    `loss`: scores stay divided by vocabulary up to the loss. `branches`: towers or heads by module name, and the rank
    of the tensor axis that each lives on; the others are handed its result."""

    splits: dict[str, Split] = _choice({}, "same")
    sequence: bool = _choice(False, "same")
    loss: bool = _choice(False, "same")
    branches: dict[str, NonNegativeInt] = _choice({}, "same")

    def split_of(self, module: str) -> Split | None:
        parts = module.split(".")
        for pattern, split in self.splits.items():
            asked = pattern.split(".")
            if len(asked) == len(parts) and all(a in ("*", b) for a, b in zip(asked, parts, strict=True)):
                return split
        return None


class Pipeline(_Group):
    """`microbatches` of a rank's share of a step go through the stages. A stage begins behind each module of `cuts`;
    with all schedules but `gpipe` and `1f1b` a rank may have several (cuts = ranks × stages of a rank - 1)."""

    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"] = _choice("1f1b", "same")
    microbatches: PositiveInt = _choice(1, "same")
    cuts: tuple[str, ...] = _choice((), "same")


class Memory(_Group):
    """`sharding`: what the shard axis divides, each level with those before it. `recompute`: activations of a block
    are computed again in the backward pass, all of them or (`selective`) all but those of matrix products and
    attention. `accumulation`: microbatches that a rank computes one after another before gradients are combined."""

    sharding: Literal["optimizer", "gradients", "parameters"] = _choice("parameters", "same")
    recompute: Literal["none", "selective", "full"] = _choice("none", "same")
    accumulation: PositiveInt = _choice(1, "same")


class NumericsGroup(_Group):
    """`fp32` runs the model in the types it was built with, `tf32` too but with products of shorter mantissas; `bf16`
    and `fp16` compute its forward pass under autocast, `fp16` with a scaled loss; `fp8` is `bf16` with linear layers'
    products in 8 bits. `auto` is replaced, before a run, by what is fastest here. `cast`: what is rounded to `bf16` or
    `fp16`, each operator's inputs or already the weights that the shard axis gathers, whose fp32 originals stay
    divided. `batch_norm` takes its statistics over a rank's microbatch, or over that of all ranks with other samples.
    """

    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp8", "auto"] = _choice("fp32", "changes")
    cast: Literal["operators", "weights"] = _choice("operators", "changes")
    batch_norm: Literal["local", "synchronized"] = _choice("local", "changes")


class Gradients(_Group):
    """How gradients are combined over the replicate axis: `bucket_bytes` travel together, in the parameters' own type
    (`fp32`) or rounded, by an `algorithm`; `auto` is shared memory between CPU ranks of one machine, and the backend's
    own elsewhere. `powersgd_rank`: only products of two matrices of that rank travel. `local_steps`: so many steps each
    rank takes alone before weights are averaged, the first `local_after` steps together. Or `servers`: so many ranks
    beside the training ranks hold the parameters and the optimizer, and wait for everybody's gradients, for nobody's,
    or let no worker run ahead of the slowest by more than `staleness` steps."""

    algorithm: Algorithm = _choice("auto", "same")
    bucket_bytes: PositiveInt = _choice(25 * MIB, "same")
    precision: Literal["fp32", "bf16", "fp16"] = _choice("fp32", "changes")
    powersgd_rank: NonNegativeInt = _choice(0, "changes")
    local_steps: PositiveInt = _choice(1, "changes")
    local_after: NonNegativeInt = _choice(0, "changes")
    servers: NonNegativeInt = _choice(0, "same")
    updates: Literal["synchronous", "asynchronous", "bounded"] = _choice("synchronous", "changes")
    staleness: NonNegativeInt = _choice(2, "changes")


class Compute(_Group):
    """The layout of images; `compile`: blocks are compiled, with a search for the fastest kernels in `max-autotune`;
    `cuda_graphs`: what is launched on a GPU is recorded once; `fused_optimizer`: one kernel updates many weights;
    `threads` per rank (null: the cores divided among the ranks of a machine)."""

    layout: Literal["contiguous", "channels_last"] = _choice("contiguous", "rounding")
    compile: Literal["none", "default", "max-autotune"] = _choice("none", "rounding")
    cuda_graphs: bool = _choice(False, "rounding")
    fused_optimizer: bool = _choice(False, "rounding")
    threads: PositiveInt | None = _choice(None, "rounding")


class Plan(_Group):
    """Complete: applying it decides nothing."""

    axes: Axes = Axes()
    modules: Modules = Modules()
    pipeline: Pipeline = Pipeline()
    memory: Memory = Memory()
    numerics: NumericsGroup = NumericsGroup()
    gradients: Gradients = Gradients()
    compute: Compute = Compute()

    @model_validator(mode="after")
    def _branches_fit_the_axis(self) -> Self:
        for name, place in self.modules.branches.items():
            if place >= self.axes.tensor:
                raise ValueError(
                    f"modules.branches.{name} is {place}, but the tensor axis has {self.axes.tensor} ranks, numbered"
                    f" from 0: raise axes.tensor or choose a rank below it"
                )
        return self

    @model_validator(mode="after")
    def _exchange_fits_together(self) -> Self:
        """What changes how replicas meet does so alone: where only they are, and one way at a time."""
        gradients, alone = self.gradients, self.world_size == self.axes.replicate
        chosen = {
            "servers": gradients.servers > 0,
            "local_steps": gradients.local_steps > 1,
            "powersgd_rank": gradients.powersgd_rank > 0,
        }
        named = [name for name, is_chosen in chosen.items() if is_chosen]
        if named and not alone:
            raise ValueError(
                f"gradients.{named[0]} is {getattr(gradients, named[0])}, which is for replicas alone, but the plan has"
                " other axes, too: set these to 1, or leave it out"
            )
        if len(named) > 1:
            raise ValueError(f"gradients.{named[0]} and gradients.{named[1]} exclude each other: choose one")
        if named and gradients.precision != "fp32":
            raise ValueError(
                f"gradients.{named[0]} decides what travels itself, but gradients.precision is {gradients.precision}:"
                " set that to fp32"
            )
        if gradients.algorithm not in ("auto", "native") and (named or self.axes.shard > 1):
            # Said, not ignored: servers, factors and averaged weights go their own way, and so does what is sharded.
            beside = f"gradients.{named[0]}" if named else f"axes.shard ({self.axes.shard})"
            raise ValueError(
                f"gradients.algorithm is {gradients.algorithm}, which combines the gradients of replicas, but {beside}"
                " does that otherwise: set the algorithm to auto"
            )
        if gradients.updates != "synchronous" and not gradients.servers:
            raise ValueError(
                f"gradients.updates is {gradients.updates}, which parameter servers do: set gradients.servers"
            )
        return self

    @model_validator(mode="after")
    def _stages_fit_the_axis(self) -> Self:
        stages, ranks, schedule = len(self.pipeline.cuts) + 1, self.axes.pipeline, self.pipeline.schedule
        if stages == 1:
            return self
        if stages % ranks:
            raise ValueError(f"{stages - 1} cuts make {stages} stages, which {ranks} pipeline ranks do not divide")
        wanted = STAGES_PER_RANK.get(schedule, stages // ranks)
        if stages != wanted * ranks:
            raise ValueError(
                f"{schedule} runs {wanted} {'stage' if wanted == 1 else 'stages'} a rank, but {stages - 1} cuts make"
                f" {stages} stages for {ranks} ranks"
            )
        return self

    @property
    def stages_per_rank(self) -> int:
        return max(1, (len(self.pipeline.cuts) + 1) // self.axes.pipeline)

    @property
    def shares(self) -> int:
        """Into how many microbatches all ranks together divide a global batch."""
        return self.data_ranks * self.microbatches

    @property
    def data_ranks(self) -> int:
        """How many ranks have samples of their own; the tensor and pipeline peers of each have the same ones."""
        return self.axes.replicate * self.axes.shard

    @property
    def microbatches(self) -> int:
        """Into how many a rank's share of a step is cut."""
        return self.memory.accumulation * self.pipeline.microbatches

    @property
    def world_size(self) -> int:
        return self.data_ranks * self.axes.tensor * self.axes.pipeline

    @property
    def processes(self) -> int:
        """The training ranks, and the servers beside them."""
        return self.world_size + self.gradients.servers

    def summary(self) -> str:
        """One line: `replicate 4 × tensor 2 · bf16 · 1f1b/8 · recompute full`."""
        axes = [f"{name} {size}" for name, size in self.axes.model_dump().items() if size > 1]
        parts = [" × ".join(axes) or "one rank", self.numerics.precision]
        if self.numerics.cast != "operators":
            parts.append(f"{self.numerics.precision} weights")
        if any(split.axis == "replicate" for split in self.modules.splits.values()):
            parts.append("wide layers split")
        if self.modules.sequence:
            parts.append("sequence")
        if self.modules.branches:
            parts.append("branches apart")
        if self.axes.pipeline > 1:
            parts.append(f"{self.pipeline.schedule}/{self.pipeline.microbatches}")
        if self.axes.shard > 1 and self.memory.sharding != "parameters":
            parts.append(f"shard {self.memory.sharding}")
        if self.memory.recompute != "none":
            parts.append(f"recompute {self.memory.recompute}")
        if self.memory.accumulation > 1:
            parts.append(f"accumulate {self.memory.accumulation}")
        if self.numerics.batch_norm != "local":
            parts.append(f"{self.numerics.batch_norm} BatchNorm")
        if self.gradients.precision != "fp32":
            parts.append(f"{self.gradients.precision} gradients")
        parts += self._exchange_words()
        if self.compute.layout != "contiguous":
            parts.append(self.compute.layout)
        if self.compute.compile != "none":
            parts.append("compiled" if self.compute.compile == "default" else f"compiled {self.compute.compile}")
        if self.compute.cuda_graphs:
            parts.append("CUDA graphs")
        if self.compute.fused_optimizer:
            parts.append("fused optimizer")
        return " · ".join(parts)

    def _exchange_words(self) -> list[str]:
        words, gradients = [], self.gradients
        if gradients.algorithm != "auto":
            words.append(gradients.algorithm.replace("_", " "))
        if gradients.powersgd_rank:
            words.append(f"PowerSGD {gradients.powersgd_rank}")
        if gradients.local_steps > 1:
            words.append(f"{gradients.local_steps} local steps")
        if gradients.servers:
            bound = f" {gradients.staleness}" if gradients.updates == "bounded" else ""
            words.append(f"{gradients.servers} {gradients.updates}{bound} servers")
        return words

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def save(self, path: Path) -> Self:
        path.write_text(self.to_yaml())
        return self
