"""`Plan`: how to train a model, with every choice spelled out. The planner writes plans, the trainer executes them, and
both share this vocabulary. The module does not import torch."""

from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import model_validator

from meshwright import doors
from meshwright.files.storage import write_atomically
from meshwright.plan_fields.effects import NUMERICS, Numerics, PlanGroup, effect
from meshwright.plan_fields.groups import (
    BUCKET_BYTES,
    MIB,
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
from meshwright.plan_rules.table import refusal


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
    def _keeps_the_rules(self) -> Self:
        if (reason := refusal(self, "plan")) is not None:
            raise ValueError(reason)
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
        return refusal(self, "compile")

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
        return cls.model_validate(doors.function("plan", "deepspeed")(config, ranks))

    def to_yaml(self, only_differences: bool = False) -> str:
        """The plan, or only what differs from the defaults, as YAML text, which `load_plan` reads back as this plan."""
        return yaml.safe_dump(self.model_dump(mode="json", exclude_defaults=only_differences), sort_keys=False)

    def save(self, path: Path) -> Self:
        """Writes the plan as a YAML file; returns the plan."""
        write_atomically(path, self.to_yaml())
        return self
