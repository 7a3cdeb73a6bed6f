"""`Plan`: how to train, every choice spelled out. The vocabulary that planning and execution share; no torch.

Each field is marked with what it does to the numbers: `same` (the training is equal up to summation order),
`rounding` (other kernels, other last bits) or `changes` (another arithmetic).
"""

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

Numerics = Literal["same", "rounding", "changes"]
MIB = 2**20


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


class Memory(_Group):
    """`accumulation`: microbatches that a rank computes one after another before gradients are combined."""

    accumulation: PositiveInt = _choice(1, "same")


class NumericsGroup(_Group):
    """`fp32` runs the model in the types it was built with; `bf16` computes its forward pass under autocast."""

    precision: Literal["fp32", "bf16"] = _choice("fp32", "changes")


class Gradients(_Group):
    """How gradients are combined: `bucket_bytes` travel together."""

    bucket_bytes: PositiveInt = _choice(25 * MIB, "same")


class Compute(_Group):
    """`threads` per rank (null: the cores divided among the ranks of a machine) and the layout of images."""

    layout: Literal["contiguous", "channels_last"] = _choice("contiguous", "rounding")
    threads: PositiveInt | None = _choice(None, "rounding")


class Plan(_Group):
    """Complete: applying it decides nothing."""

    axes: Axes = Axes()
    memory: Memory = Memory()
    numerics: NumericsGroup = NumericsGroup()
    gradients: Gradients = Gradients()
    compute: Compute = Compute()

    @property
    def world_size(self) -> int:
        return self.axes.replicate * self.axes.shard * self.axes.tensor * self.axes.pipeline

    def summary(self) -> str:
        """One line: `replicate 4 × tensor 2 · bf16 · accumulate 2`."""
        axes = [f"{name} {size}" for name, size in self.axes.model_dump().items() if size > 1]
        parts = [" × ".join(axes) or "one rank", self.numerics.precision]
        if self.memory.accumulation > 1:
            parts.append(f"accumulate {self.memory.accumulation}")
        if self.compute.layout != "contiguous":
            parts.append(self.compute.layout)
        return " · ".join(parts)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(), sort_keys=False)

    def save(self, path: Path) -> Self:
        path.write_text(self.to_yaml())
        return self
