"""`ModelProfile`: what one training step of a model costs, as a function of the batch size.

A step is a list of segments: the forward pass in order, then the backward pass. Each segment belongs to one unit of the
model (a block that repeats, or the code before, between and after blocks) and lists its operators and its changes of
memory. Equal blocks in a row are one segment with a count. The simulator prices and replays these segments.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from meshwright.blocks.operator_kinds import OperatorKind
from meshwright.profile.structure.structure import Structure

Phase = Literal["forward", "backward"]
MemoryRole = Literal["saved", "gradient", "temporary"]


@dataclass(frozen=True)
class BatchPolynomial:
    """A quantity as a function of the batch size: constant + linear · batch + square · batch². The square is zero
    except in models that compare the samples of a batch with each other."""

    constant: float
    linear: float
    square: float = 0.0

    def at(self, batch: float) -> float:
        """The value for a batch of this many samples."""
        return self.constant + (self.linear + self.square * batch) * batch

    def scaled(self, factor: float) -> "BatchPolynomial":
        """The polynomial with every coefficient multiplied by `factor`."""
        return BatchPolynomial(self.constant * factor, self.linear * factor, self.square * factor)


@dataclass(frozen=True)
class SplitMark:
    """How an operator or a tensor takes part when the group of modules named `group` is split along the tensor axis.

    - `divided`: each rank computes or holds its part.
    - `divided_with_loss`: the same, but only where the scores stay divided up to the loss.
    - `whole_input`: the tensor is a whole input of the group, also where the tensors around the group are divided along
      the sequence.
    """

    group: str
    part: Literal["divided", "divided_with_loss", "whole_input"] = "divided"


@dataclass(frozen=True)
class Operator:
    """One operator of a step.

    `layer` is the module that ran it; in the backward pass, the module whose gradient it computes. `dtype` is torch's
    name ("float32", ...), empty where no tensor is floating-point. `split` is None for an operator that no split
    divides. `workspace_bytes` is the memory that it takes on a GPU while it runs. `computes_gradient` is False in the
    forward pass and for operators that the backward pass only recomputes.
    """

    layer: str
    name: str
    kind: OperatorKind
    dtype: str
    flops: BatchPolynomial
    bytes: BatchPolynomial
    shape: tuple[BatchPolynomial, ...]
    split: SplitMark | None = None
    workspace_bytes: BatchPolynomial = BatchPolynomial(0.0, 0.0)
    computes_gradient: bool = False


@dataclass(frozen=True)
class MemoryChange:
    """Memory that is allocated (or, where `bytes` is negative, freed) after `after_operators` operators of the segment.

    A `saved` tensor is kept from the forward pass for the backward pass, a `gradient` is that of a parameter, and a
    `temporary` tensor is allocated and freed within one pass. `tensor_count` equal tensors change at once.
    """

    after_operators: int
    bytes: BatchPolynomial
    role: MemoryRole
    layer: str
    tensor_count: int = 1
    split: SplitMark | None = None


@dataclass(frozen=True)
class TraceSegment:
    """Consecutive operators of one pass, with their changes of memory.

    `blocks` are the equal blocks in a row that the segment stands for, in the order of the forward pass; it is empty
    for a segment between blocks. `unit` is the first of these blocks, or empty.
    """

    unit: str
    phase: Phase
    blocks: tuple[str, ...]
    operators: tuple[Operator, ...]
    changes: tuple[MemoryChange, ...]

    @property
    def block_count(self) -> int:
        """How often the segment runs in a step."""
        return len(self.blocks) or 1


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model. `names` are all names of a tied weight; it is trained under the first of them."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    trainable: bool


@dataclass(frozen=True)
class ModelProfile:
    """The cost of one training step of a model.

    `blocks` are the modules that are recomputed, or whose weights are gathered, one after another. `structure` is None
    unless it was requested; splits along the tensor axis and pipeline stages need it.
    """

    precision: str
    parameters: tuple[Parameter, ...]
    buffer_bytes: int
    input_bytes: BatchPolynomial
    segments: tuple[TraceSegment, ...]
    traced_batches: tuple[int, ...]
    recompute: str = "none"
    blocks: tuple[str, ...] = ()
    structure: Structure | None = None

    @property
    def parameter_count(self) -> int:
        """Number of elements of all parameters, tied weights counted once."""
        return sum(prod(parameter.shape) for parameter in self.parameters)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, tied weights counted once."""
        return sum(parameter.bytes for parameter in self.parameters)

    def flops(self, batch: float, phase: Phase | None = None) -> float:
        """FLOPs of one step, or of one of its two passes."""
        return sum(
            segment.block_count * sum(operator.flops.at(batch) for operator in segment.operators)
            for segment in self.segments
            if phase is None or segment.phase == phase
        )

    def saved_bytes(self, batch: float) -> float:
        """Bytes that all units together keep between the forward and the backward pass."""
        return sum(
            segment.block_count * sum(change.bytes.at(batch) for change in segment.changes if change.role == "saved")
            for segment in self.segments
            if segment.phase == "forward"
        )
