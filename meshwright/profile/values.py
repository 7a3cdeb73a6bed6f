"""`ModelProfile`: what one training step of a model costs, as a function of the batch size.

A step is a list of stretches: the forward pass in order, then the backward pass. Each stretch belongs to one unit
of the model (a block that repeats, or what lies before, between and after blocks) and lists its operators and its
changes of memory. Equal blocks are one stretch with a count.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from meshwright.blocks.operator_kinds import Kind
from meshwright.profile.structure.structure import Structure

Phase = Literal["forward", "backward"]
Role = Literal["saved", "gradient", "temporary"]
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # by the dtype of an operator


@dataclass(frozen=True)
class Growth:
    """constant + linear · batch + square · batch². The square is zero but for models that compare the samples of a
    batch with each other."""

    constant: float
    linear: float
    square: float = 0.0

    def at(self, batch: float) -> float:
        return self.constant + (self.linear + self.square * batch) * batch

    def times(self, factor: float) -> "Growth":
        return Growth(self.constant * factor, self.linear * factor, self.square * factor)


@dataclass(frozen=True)
class Operator:
    """One operator of a step. `layer` is the module that ran it, in backward the one whose gradient it computes.
    `split` is the group of modules it is divided with, if it is; `workspace` is what it takes on a GPU while it
    runs; `gradient`: it computes one, unlike what a backward pass computes again."""

    layer: str
    name: str
    kind: Kind
    dtype: str
    flops: Growth
    bytes: Growth
    shape: tuple[Growth, ...]
    split: str = ""
    workspace: Growth = Growth(0.0, 0.0)
    gradient: bool = False


@dataclass(frozen=True)
class Change:
    """Memory that is taken (or, where negative, given back) after `operator` operators of the stretch.

    `saved` is kept from the forward pass for the backward pass, `gradient` is a parameter's, `temporary` lives and
    dies within a pass. `times` equal tensors go at once.
    """

    operator: int
    bytes: Growth
    role: Role
    layer: str
    times: int = 1
    split: str = ""


@dataclass(frozen=True)
class Stretch:
    """`blocks` are the equal blocks in a row that it stands for, in the order of the forward pass; none between
    blocks."""

    unit: str
    phase: Phase
    blocks: tuple[str, ...]
    operators: tuple[Operator, ...]
    changes: tuple[Change, ...]

    @property
    def count(self) -> int:
        return len(self.blocks) or 1


@dataclass(frozen=True)
class Parameter:
    """`names` are all names of a tied weight, the first of them the one it is trained under."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    trainable: bool


@dataclass(frozen=True)
class ModelProfile:
    """`blocks` are what is computed again, or gathered, one after another. `structure` is there where it was asked
    for: splits and stages need it."""

    precision: str
    parameters: tuple[Parameter, ...]
    buffer_bytes: int
    input_bytes: Growth
    stretches: tuple[Stretch, ...]
    traced_batches: tuple[int, ...]
    recompute: str = "none"
    blocks: tuple[str, ...] = ()
    structure: Structure | None = None

    @property
    def parameter_count(self) -> int:
        return sum(prod(parameter.shape) for parameter in self.parameters)

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.bytes for parameter in self.parameters)

    def flops(self, batch: float, phase: Phase | None = None) -> float:
        return sum(
            stretch.count * sum(operator.flops.at(batch) for operator in stretch.operators)
            for stretch in self.stretches
            if phase is None or stretch.phase == phase
        )

    def saved_bytes(self, batch: float) -> float:
        """Kept between the passes, all units together."""
        return sum(
            stretch.count * sum(c.bytes.at(batch) for c in stretch.changes if c.role == "saved")
            for stretch in self.stretches
            if stretch.phase == "forward"
        )
