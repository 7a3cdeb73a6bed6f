"""`ModelProfile`: what one training step of a model costs, as a function of the batch size.

A step is a list of stretches: the forward pass in order, then the backward pass. Each stretch belongs to one unit
of the model (a block that repeats, or what lies before, between and after blocks) and lists its operators and its
changes of memory. Equal blocks are one stretch with a count.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from meshwright.profile.operators import Kind

Phase = Literal["forward", "backward"]
Role = Literal["saved", "gradient", "temporary"]


@dataclass(frozen=True)
class Growth:
    """constant + linear · batch + square · batch². The square is zero but for models that compare the samples of a
    batch with each other."""

    constant: float
    linear: float
    square: float = 0.0

    def at(self, batch: float) -> float:
        return self.constant + (self.linear + self.square * batch) * batch


@dataclass(frozen=True)
class Operator:
    """One operator of a step. `layer` is the module that ran it, in backward the one whose gradient it computes."""

    layer: str
    name: str
    kind: Kind
    dtype: str
    flops: Growth
    bytes: Growth
    shape: tuple[Growth, ...]


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


@dataclass(frozen=True)
class Stretch:
    unit: str
    phase: Phase
    count: int  # how many equal blocks in a row it stands for
    operators: tuple[Operator, ...]
    changes: tuple[Change, ...]


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
    precision: str
    parameters: tuple[Parameter, ...]
    buffer_bytes: int
    input_bytes: Growth
    stretches: tuple[Stretch, ...]
    traced_batches: tuple[int, ...]

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
