"""`Plan`: how to train a model, with every choice spelled out. The planner writes plans, the trainer executes them, and
both share this vocabulary. The module does not import torch."""

from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import model_validator

from meshwright.deepspeed_config.plan_groups import plan_of_config
from meshwright.files.storage import write_atomically
from meshwright.numbers.limits import MOST_DEVICES
from meshwright.plan_fields.effects import NUMERICS, Numerics, PlanGroup, effect
from meshwright.plan_fields.groups import (
    BUCKET_BYTES,
    MIB,
    STAGES_PER_RANK,
    Axes,
    Compute,
    Gradients,
    Memory,
    Modules,
    NumericsGroup,
    Pipeline,
    Shares,
)
from meshwright.plan_fields.shares import describe_shares, share_sizes


class Plan(PlanGroup):
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
    shares: Shares = Shares()

    @model_validator(mode="after")
    def _axes_have_a_possible_number_of_ranks(self) -> Self:
        if self.world_size > MOST_DEVICES:
            axes = " × ".join(f"{name}({size})" for name, size in self.axes.factors.items())
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
        gradients = self.gradients
        only_replicas = self.world_size == self.axes.replicate and self.axes.expert == 1
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
    def _every_data_rank_has_a_share(self) -> Self:
        given, axes = len(self.shares.samples), self.axes
        if given and given != self.data_ranks:
            raise ValueError(
                f"shares.samples has {given} {'number' if given == 1 else 'numbers'}, but replicate({axes.replicate}) ×"
                f" shard({axes.shard}) = {self.data_ranks} {'rank trains' if self.data_ranks == 1 else 'ranks train'}"
                " on different samples: give one number for each of them, or leave shares out for even shares"
            )
        return self

    @model_validator(mode="after")
    def _shares_fit_the_way_gradients_are_combined(self) -> Self:
        gradients, shares = self.gradients, self.shares
        if not (shares.samples or shares.adaptive):
            return self
        samples = describe_shares(shares.samples)
        given = f"shares.samples is [{samples}]" if samples else "shares.adaptive is true"
        if gradients.local_steps > 1:
            raise ValueError(
                f"{given}, but gradients.local_steps is {gradients.local_steps}: ranks that take steps alone have the"
                " same weight when their weights are averaged: leave out shares, or set gradients.local_steps to 1"
            )
        if gradients.updates != "synchronous":
            raise ValueError(
                f"{given}, but gradients.updates is {gradients.updates}: a worker that does not wait for the others"
                " needs no share that fits its speed: leave out shares, or set gradients.updates to synchronous"
            )
        if gradients.servers and shares.adaptive:
            raise ValueError(
                f"shares.adaptive is true, but gradients.servers is {gradients.servers}: workers of parameter servers"
                " do not exchange how fast they are: set shares.adaptive to false, or gradients.servers to 0"
            )
        return self

    @model_validator(mode="after")
    def _every_shard_rank_has_a_proportion(self) -> Self:
        shards, axes = self.shares.shards, self.axes
        if not shards:
            return self
        given = f"shares.shards is [{describe_shares(shards)}]"
        if len(shards) != axes.shard or axes.shard == 1:
            raise ValueError(
                f"{given}, {len(shards)} {'number' if len(shards) == 1 else 'numbers'}, but axes.shard is {axes.shard}:"
                + (" give one number for each rank of the shard axis" if axes.shard > 1 else " set it above 1")
                + ", or leave shares.shards out"
            )
        others = {
            "axes.context": (axes.context, 1),
            "axes.expert": (axes.expert, 1),
            "memory.offload": (self.memory.offload, "none"),
            "numerics.precision": (self.numerics.precision, "bf16" if self.numerics.precision == "fp8" else None),
        }
        for name, (value, needed) in others.items():
            if needed not in (value, None):
                raise ValueError(
                    f"{given}, but {name} is {value}, with which shards are divided evenly only: set {name} to"
                    f" {needed}, or leave shares.shards out"
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
    def batch_parts(self) -> int:
        """Number of microbatches into which all ranks together divide a global batch."""
        return self.data_ranks * self.microbatches

    def share_sizes(self, global_batch: int) -> list[int]:
        """How many samples of a global batch each data rank gets; with adaptive shares, in the first steps."""
        return share_sizes(global_batch, self.shares.samples or (1,) * self.data_ranks)

    def shard_part(self, coordinate: int | None = None) -> float:
        """The part of weights, gradients and optimizer state that a rank with this coordinate on the shard axis holds;
        None for the rank that holds most."""
        shards = self.shares.shards or (1,) * self.axes.shard
        return (max(shards) if coordinate is None else shards[coordinate]) / sum(shards)

    @property
    def shard_padding(self) -> float:
        """How many times as many bytes are exchanged over the shard axis as with even shards, because all shards are
        padded to the largest one."""
        return self.shard_part() * self.axes.shard

    @property
    def data_ranks(self) -> int:
        """Number of ranks that train on different samples. Ranks that differ only in their context, tensor or pipeline
        coordinate train on the same samples."""
        return self.axes.replicate * self.axes.shard

    @property
    def microbatches(self) -> int:
        """Number of microbatches into which one rank's share of a global batch is cut."""
        return self.memory.accumulation * self.pipeline.microbatches

    @property
    def world_size(self) -> int:
        """Number of training ranks; parameter servers are not counted."""
        return self.data_ranks * self.axes.context * self.axes.tensor * self.axes.pipeline

    @property
    def compile_obstacle(self) -> str | None:
        """Why nothing of a model can be compiled under this plan; None if its parts can be."""
        if self.axes.expert > 1:
            return "models whose experts are divided over ranks are not compiled"
        if any(split.axis == "replicate" and split.kind != "none" for split in self.modules.splits.values()):
            return "layers that are split over the replicate axis are not compiled"
        if self.axes.context > 1:
            return "models whose sequences are divided over the context axis are not compiled"
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
            getattr(group, name) == field.default or NUMERICS.index(effect(field)) <= NUMERICS.index(allow)
            for _, group in self
            for name, field in type(group).model_fields.items()
        )

    def summary(self) -> str:
        """The plan in one line, with the fields that differ from their defaults, such as
        `replicate 4 × tensor 2 · bf16 · 1f1b/8 · recompute full`."""
        axes = [f"{name} {size}" for name, size in self.axes.factors.items()]
        numerics, memory, gradients, compute = self.numerics, self.memory, self.gradients, self.compute
        mode = "" if compute.compile_mode == "default" else f" {compute.compile_mode}"
        bound = f" {gradients.staleness}" if gradients.updates == "bounded" else ""
        choices = [
            (self.axes.expert > 1, f"experts over {self.axes.expert}"),
            (numerics.cast != "operators", f"{numerics.precision} weights"),
            (any(split.axis == "replicate" for split in self.modules.splits.values()), "wide layers split"),
            (self.modules.sequence, "sequence"),
            (bool(self.modules.branches), "branches apart"),
            (self.axes.context > 1 and self.modules.attention_exchange == "ring", "ring attention"),
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
            (bool(self.shares.samples), f"shares {describe_shares(self.shares.samples)}"),
            (self.shares.adaptive, "adaptive shares"),
            (bool(self.shares.shards), f"shards {describe_shares(self.shares.shards)}"),
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
