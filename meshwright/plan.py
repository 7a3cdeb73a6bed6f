"""`Plan`: how to train a model, with every choice spelled out. The planner writes plans, the trainer executes them, and
both share this vocabulary. The module does not import torch.

Each field is marked with its effect on the numerical result: `same` (equal up to the order of summation), `rounding`
(other kernels, so the last bits may differ) or `changes` (different arithmetic).
"""

from pathlib import Path
from typing import Any, Literal, Self, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from meshwright.deepspeed_config.plan_groups import plan_of_config
from meshwright.files.storage import write_atomically
from meshwright.limits import (
    MOST_DEVICES,
    CountOrZero,
    Devices,
    LossChunks,
    MessageBytes,
    Microbatches,
    ProcessesOrZero,
    RankNumber,
    Steps,
    StepsOrZero,
    Threads,
)

Numerics = Literal["same", "rounding", "changes"]
NUMERICS: tuple[Numerics, ...] = ("same", "rounding", "changes")  # each includes the ones before it
Algorithm = Literal["auto", "native", "ring", "tree", "halving_doubling", "two_level", "shared_memory"]
MIB = 2**20
BUCKET_BYTES = 25 * MIB  # the default of torch, too
# The last axis varies fastest over the ranks: tensor ranks, which exchange the most bytes, are neighbours.
MESH_ORDER = ("pipeline", "replicate", "shard", "tensor")
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "zbv": 2}  # the other schedules accept any number


def _choice(default: Any, numerics: Numerics, **limits: Any) -> Any:
    return Field(default=default, json_schema_extra={"numerics": numerics}, **limits)


def _effect(field: FieldInfo) -> Numerics:
    assert isinstance(field.json_schema_extra, dict)
    return cast(Numerics, field.json_schema_extra["numerics"])


class _PlanGroup(BaseModel):
    """A frozen group of a plan's fields that refuses unknown ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Axes(_PlanGroup):
    """The sizes of the device mesh's axes. Their product is the number of training ranks.

    `replicate`: ranks that hold a full copy of the model and train on different samples. `shard`: ranks that train on
    different samples and divide weights, gradients and optimizer state among them. `tensor`: ranks that train on the
    same samples and divide the layers among them. `pipeline`: ranks that hold consecutive stages of the model.
    """

    replicate: Devices = _choice(1, "same")
    shard: Devices = _choice(1, "same")
    tensor: Devices = _choice(1, "same")
    pipeline: Devices = _choice(1, "same")


class Split(_PlanGroup):
    """How one layer's weight is divided among ranks, and along which axis of the mesh.

    `kind`: `column` divides the output features, `row` the input features, `vocabulary` the tokens of an embedding or
    of an output layer; `none` leaves the layer undivided. With `axis: replicate` the batch is all-gathered before the
    layer and scattered again after it. A few huge layers can thus be divided while the rest of the model is replicated.
    """

    kind: Literal["column", "row", "vocabulary", "none"]
    axis: Literal["tensor", "replicate"] = "tensor"


class Modules(_PlanGroup):
    """How the layers are divided over the tensor axis.

    `splits` maps module names to splits; in a name, `*` stands for one component between dots. Layers that are not
    named are split along the tensor axis as the model's structure suggests. `sequence`: activations between split
    layers are divided along the sequence dimension. `loss`: logits stay divided by vocabulary up to and including the
    loss. `branches` maps the module names of towers or heads to the tensor-axis rank that computes them; the other
    ranks receive the output.
    """

    splits: dict[str, Split] = _choice({}, "same")
    sequence: bool = _choice(False, "same")
    loss: bool = _choice(False, "same")
    branches: dict[str, RankNumber] = _choice({}, "same")

    def split_of(self, module: str) -> Split | None:
        """The split that `splits` gives the module, by the first pattern that matches; None when no pattern does."""
        components = module.split(".")
        for pattern, split in self.splits.items():
            patterns = pattern.split(".")
            if len(patterns) == len(components) and all(
                wanted in ("*", actual) for wanted, actual in zip(patterns, components, strict=True)
            ):
                return split
        return None


class Pipeline(_PlanGroup):
    """How the stages of the pipeline axis are cut and scheduled.

    `microbatches`: number of microbatches into which a rank's share of a step is cut for the pipeline. `cuts`: the
    modules after which a new stage begins, so the number of cuts is ranks × stages per rank - 1. With `gpipe` and
    `1f1b` every rank has one stage; with the other schedules it may have several.
    """

    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"] = _choice("1f1b", "same")
    microbatches: Microbatches = _choice(1, "same")
    cuts: tuple[str, ...] = _choice((), "same")


class Memory(_PlanGroup):
    """How the plan saves memory at the cost of communication or compute.

    `sharding`: what the shard axis divides: with `optimizer` the optimizer state, with `gradients` also the gradients,
    with `parameters` also the parameters. `recompute`: which activations of a block are computed again in the backward
    pass: `none`; `selective`, all but those of matrix products and attention; `full`, all of them. `accumulation`:
    number of microbatches that a rank computes one after another before gradients are combined. `offload`: what GPU
    ranks keep in CPU memory: with `optimizer` the optimizer state, whose step runs there; with `parameters` all shards.
    """

    sharding: Literal["optimizer", "gradients", "parameters"] = _choice("parameters", "same")
    recompute: Literal["none", "selective", "full"] = _choice("none", "same")
    accumulation: Microbatches = _choice(1, "same")
    offload: Literal["none", "optimizer", "parameters"] = _choice("none", "rounding")


class NumericsGroup(_PlanGroup):
    """In which precision the model computes.

    `precision`: `fp32` keeps the dtypes that the model was built with. `tf32` does too, but multiplies matrices with
    10-bit mantissas. `bf16` and `fp16` run the forward pass under autocast, `fp16` with a scaled loss. `fp8` is `bf16`
    with the matrix products of linear layers in 8 bits. `auto` is replaced before the run by the precision that is
    measured to be the fastest.
    `cast`: what is rounded to `bf16` or `fp16`: the inputs of `operators` (autocast), or the `weights` before the
    shard axis gathers them, while their fp32 originals stay sharded.
    `batch_norm`: whether BatchNorm's statistics are taken over a rank's own microbatch (`local`) or over the
    microbatches of all data-parallel ranks (`synchronized`).
    """

    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp8", "auto"] = _choice("fp32", "changes")
    cast: Literal["operators", "weights"] = _choice("operators", "changes")
    batch_norm: Literal["local", "synchronized"] = _choice("local", "changes")


class Gradients(_PlanGroup):
    """How the ranks of the replicate axis combine their gradients.

    `algorithm`: the all-reduce algorithm; `auto` uses shared memory between CPU ranks of one machine, and the backend's
    own all-reduce elsewhere. `bucket_bytes`: size of the buckets in which gradients are sent. `precision`: the dtype in
    which they are sent; `fp32` means the parameters' own dtype. `powersgd_rank`: when above 0, PowerSGD compresses each
    gradient to two factors of this rank. `local_steps`: number of steps that each rank takes alone before weights are
    averaged (local SGD); in the first `local_after` steps, gradients are still averaged in every step.
    `servers`: number of additional ranks that hold the parameters and the optimizer (parameter servers); 0 means none.
    `updates`: the servers wait for the gradients of all workers (`synchronous`), of none (`asynchronous`), or let no
    worker run ahead of the slowest one by more than `staleness` steps (`bounded`).
    """

    algorithm: Algorithm = _choice("auto", "same")
    bucket_bytes: MessageBytes = _choice(BUCKET_BYTES, "same")
    precision: Literal["fp32", "bf16", "fp16"] = _choice("fp32", "changes")
    powersgd_rank: CountOrZero = _choice(0, "changes")
    local_steps: Steps = _choice(1, "changes")
    local_after: StepsOrZero = _choice(0, "changes")
    servers: ProcessesOrZero = _choice(0, "same")
    updates: Literal["synchronous", "asynchronous", "bounded"] = _choice("synchronous", "changes")
    staleness: StepsOrZero = _choice(2, "changes")


class Compute(_PlanGroup):
    """How each rank runs its operators.

    `layout`: memory format of image tensors. `convolutions`: which kernels compute the convolutions of CPU ranks:
    torch's `default`, or `nnpack`, those of NNPACK with gradients as convolutions and matrix products. `compile`: what
    `torch.compile` compiles: `none`, each of the model's `blocks` by itself, or the whole `model`. `compile_mode`: with
    `max-autotune`, the compiler measures several kernels for each product. `cuda_graphs`: kernel launches are captured
    once as a CUDA graph and replayed. `fused_optimizer`: one kernel updates many weights. `loss_chunks`: when above 1,
    the head (the linear layer that computes the scores) is joined with the cross entropy, and the tokens of a
    microbatch go through both in this many chunks, so that only the scores of one chunk are in memory. `threads`: CPU
    threads per rank; null divides the machine's cores among its ranks.
    """

    layout: Literal["contiguous", "channels_last"] = _choice("contiguous", "rounding")
    convolutions: Literal["default", "nnpack"] = _choice("default", "rounding")
    compile: Literal["none", "blocks", "model"] = _choice("none", "rounding")
    compile_mode: Literal["default", "max-autotune"] = _choice("default", "rounding")
    cuda_graphs: bool = _choice(False, "rounding")
    fused_optimizer: bool = _choice(False, "rounding")
    loss_chunks: LossChunks = _choice(1, "rounding")
    threads: Threads | None = _choice(None, "rounding")

    @property
    def image_kernels(self) -> Literal["contiguous", "channels_last", "nnpack"]:
        """What decides the speed of operators on images: their memory format, or the kernels of their convolutions."""
        return self.layout if self.convolutions == "default" else "nnpack"

    @model_validator(mode="before")
    @classmethod
    def _read_earlier_values_of_compile(cls, values: Any) -> Any:
        """In plans that were saved before `compile_mode` existed, `compile` is the mode for the model's blocks."""
        if isinstance(values, dict) and values.get("compile") in ("default", "max-autotune"):
            return {**values, "compile": "blocks", "compile_mode": values["compile"]}
        return values


class Plan(_PlanGroup):
    """How to train a model on `processes` ranks. A plan is complete: executing it involves no further decision.

    It is validated when it is constructed, prints as one line (`summary`) and is written as YAML (`save`).
    """

    axes: Axes = Axes()
    modules: Modules = Modules()
    pipeline: Pipeline = Pipeline()
    memory: Memory = Memory()
    numerics: NumericsGroup = NumericsGroup()
    gradients: Gradients = Gradients()
    compute: Compute = Compute()

    @model_validator(mode="after")
    def _axes_have_a_possible_number_of_ranks(self) -> Self:
        if self.world_size > MOST_DEVICES:
            axes = " × ".join(f"{name}({size})" for name, size in self.axes.model_dump().items() if size > 1)
            raise ValueError(f"axes: {axes} = {self.world_size:,} ranks: at most {MOST_DEVICES:,}")
        return self

    @model_validator(mode="after")
    def _branches_fit_the_axis(self) -> Self:
        for name, rank in self.modules.branches.items():
            if rank >= self.axes.tensor:
                raise ValueError(
                    f"modules.branches.{name} is {rank}, but the tensor axis has {self.axes.tensor} ranks, numbered"
                    f" from 0: raise axes.tensor or choose a rank below it"
                )
        return self

    @model_validator(mode="after")
    def _gradient_methods_are_compatible(self) -> Self:
        """Parameter servers, local steps and PowerSGD each replace the all-reduce of replicas, so a plan may choose
        only one of them, and only without other axes."""
        gradients, only_replicas = self.gradients, self.world_size == self.axes.replicate
        is_chosen = {
            "servers": gradients.servers > 0,
            "local_steps": gradients.local_steps > 1,
            "powersgd_rank": gradients.powersgd_rank > 0,
        }
        methods = [name for name, chosen in is_chosen.items() if chosen]
        if methods and not only_replicas:
            raise ValueError(
                f"gradients.{methods[0]} is {getattr(gradients, methods[0])}, which works with the replicate axis only,"
                " but the plan has other axes, too: set their sizes to 1, or leave it out"
            )
        if len(methods) > 1:
            raise ValueError(f"gradients.{methods[0]} and gradients.{methods[1]} exclude each other: choose one")
        if methods and gradients.precision != "fp32":
            raise ValueError(
                f"gradients.{methods[0]} determines the dtype that is sent, but gradients.precision is"
                f" {gradients.precision}: set gradients.precision to fp32"
            )
        if gradients.algorithm not in ("auto", "native") and (methods or self.axes.shard > 1):
            # An error, because the algorithm would have no effect: these methods and the shard axis combine gradients
            # without an all-reduce over replicas.
            other = f"gradients.{methods[0]}" if methods else f"axes.shard ({self.axes.shard})"
            raise ValueError(
                f"gradients.algorithm is {gradients.algorithm}, which combines the gradients of replicas, but {other}"
                " combines them in another way: set gradients.algorithm to auto"
            )
        if gradients.updates != "synchronous" and not gradients.servers:
            raise ValueError(
                f"gradients.updates is {gradients.updates}, which needs parameter servers: set gradients.servers to"
                " 1 or more"
            )
        return self

    @model_validator(mode="after")
    def _stages_fit_the_axis(self) -> Self:
        stages, ranks, schedule = len(self.pipeline.cuts) + 1, self.axes.pipeline, self.pipeline.schedule
        if stages == 1:
            return self
        if stages % ranks:
            raise ValueError(
                f"pipeline.cuts: {stages - 1} cuts make {stages} stages, which {ranks} pipeline ranks do not divide:"
                f" choose cuts that make {ranks} stages, or a multiple of that"
            )
        per_rank = STAGES_PER_RANK.get(schedule, stages // ranks)
        if stages != per_rank * ranks:
            raise ValueError(
                f"pipeline.schedule: {schedule} runs {per_rank} {'stage' if per_rank == 1 else 'stages'} per rank, but"
                f" {stages - 1} cuts make {stages} stages for {ranks} ranks: choose cuts that"
                f" make {per_rank * ranks} stages"
            )
        return self

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages that each rank holds."""
        return max(1, (len(self.pipeline.cuts) + 1) // self.axes.pipeline)

    @property
    def shares(self) -> int:
        """Number of microbatches into which all ranks together divide a global batch."""
        return self.data_ranks * self.microbatches

    @property
    def data_ranks(self) -> int:
        """Number of ranks that train on different samples. Ranks that differ only in their tensor or pipeline
        coordinate train on the same samples."""
        return self.axes.replicate * self.axes.shard

    @property
    def microbatches(self) -> int:
        """Number of microbatches into which one rank's share of a global batch is cut."""
        return self.memory.accumulation * self.pipeline.microbatches

    @property
    def world_size(self) -> int:
        """Number of training ranks; parameter servers are not counted."""
        return self.data_ranks * self.axes.tensor * self.axes.pipeline

    @property
    def compile_obstacle(self) -> str | None:
        """Why nothing of a model can be compiled under this plan; None if its parts can be."""
        if any(split.axis == "replicate" and split.kind != "none" for split in self.modules.splits.values()):
            return "layers that are split over the replicate axis are not compiled"
        if self.axes.tensor > 1 and self.modules.branches:
            return "models whose branches are placed on ranks are not compiled"
        if self.axes.tensor > 1 and self.memory.recompute == "selective":
            return "split layers that are recomputed selectively are not compiled"
        return None

    @property
    def processes(self) -> int:
        """Number of processes of a run: the training ranks and the parameter servers."""
        return self.world_size + self.gradients.servers

    def stays_within(self, allow: Numerics) -> bool:
        """Whether no field that differs from its default has a larger effect on the numerical result than `allow`."""
        return all(
            getattr(group, name) == field.default or NUMERICS.index(_effect(field)) <= NUMERICS.index(allow)
            for _, group in self
            for name, field in type(group).model_fields.items()
        )

    def summary(self) -> str:
        """The plan in one line, with the fields that differ from their defaults, such as
        `replicate 4 × tensor 2 · bf16 · 1f1b/8 · recompute full`."""
        axes = [f"{name} {size}" for name, size in self.axes.model_dump().items() if size > 1]
        numerics, memory, gradients, compute = self.numerics, self.memory, self.gradients, self.compute
        mode = "" if compute.compile_mode == "default" else f" {compute.compile_mode}"
        bound = f" {gradients.staleness}" if gradients.updates == "bounded" else ""
        choices = [
            (numerics.cast != "operators", f"{numerics.precision} weights"),
            (any(split.axis == "replicate" for split in self.modules.splits.values()), "wide layers split"),
            (self.modules.sequence, "sequence"),
            (bool(self.modules.branches), "branches apart"),
            (self.axes.pipeline > 1, f"{self.pipeline.schedule}/{self.pipeline.microbatches}"),
            (self.axes.shard > 1 and memory.sharding != "parameters", f"shard {memory.sharding}"),
            (memory.recompute != "none", f"recompute {memory.recompute}"),
            (memory.accumulation > 1, f"accumulate {memory.accumulation}"),
            (memory.offload != "none", f"{memory.offload} in CPU memory"),
            (numerics.batch_norm != "local", f"{numerics.batch_norm} BatchNorm"),
            (gradients.precision != "fp32", f"{gradients.precision} gradients"),
            (gradients.algorithm != "auto", gradients.algorithm.replace("_", " ")),
            (gradients.bucket_bytes != BUCKET_BYTES, f"buckets of {gradients.bucket_bytes / MIB:.3g} MiB"),
            (gradients.powersgd_rank > 0, f"PowerSGD {gradients.powersgd_rank}"),
            (gradients.local_steps > 1, f"{gradients.local_steps} local steps"),
            (gradients.servers > 0, f"{gradients.servers} {gradients.updates}{bound} servers"),
            (compute.layout != "contiguous", compute.layout),
            (compute.convolutions != "default", "NNPACK convolutions"),
            (compute.compile != "none", f"compiled {compute.compile}{mode}"),
            (compute.cuda_graphs, "CUDA graphs"),
            (compute.fused_optimizer, "fused optimizer"),
            (compute.loss_chunks > 1, f"loss in {compute.loss_chunks} chunks"),
        ]
        chosen = [words for is_chosen, words in choices if is_chosen]
        return " · ".join([" × ".join(axes) or "one rank", numerics.precision, *chosen])

    @classmethod
    def from_deepspeed(cls, config: str | Path | dict[str, Any], ranks: int | None = None) -> Self:
        """The plan of a DeepSpeed configuration, which is a path or a dict (docs/deepspeed.md)."""
        return cls.model_validate(plan_of_config(config, ranks))

    def to_yaml(self, only_differences: bool = False) -> str:
        """The plan, or only what differs from the defaults, as YAML text, which `load_plan` reads back as this plan."""
        return yaml.safe_dump(self.model_dump(mode="json", exclude_defaults=only_differences), sort_keys=False)

    def save(self, path: Path) -> Self:
        """Writes the plan as a YAML file; returns the plan."""
        write_atomically(path, self.to_yaml())
        return self
