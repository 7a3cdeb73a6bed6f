"""`ModelProfile`: what one training step of a model costs, as a function of the batch size.

A step is a list of segments: the forward pass in order, then the backward pass. Each segment belongs to one unit of the
model (a block that repeats, or the code before, between and after blocks) and lists its operators and its changes of
memory. Consecutive equal blocks share one segment, which names all of them. The simulator prices and replays these
segments.
"""

from dataclasses import dataclass, field
from math import prod
from typing import Literal

from meshwright.blocks.operator_kinds import OperatorKind
from meshwright.profile.experts import RoutedExperts
from meshwright.profile.structure.structure import Structure

Phase = Literal["forward", "backward"]
MemoryRole = Literal["saved", "gradient", "temporary"]


@dataclass(frozen=True)
class BatchPolynomial:
    """A quantity as a function of the batch size: constant + linear · batch + square · batch². `square` is zero except
    in models that compare the samples of a batch with each other."""

    constant: float
    linear: float
    square: float = 0.0

    def at(self, batch: float) -> float:
        """The value for a batch of this many samples."""
        return self.constant + (self.linear + self.square * batch) * batch

    def scaled(self, factor: float) -> "BatchPolynomial":
        """The polynomial with every coefficient multiplied by `factor`."""
        return BatchPolynomial(self.constant * factor, self.linear * factor, self.square * factor)


def fit_batch_polynomial(values: list[int], sizes: tuple[int, ...]) -> BatchPolynomial:
    """Returns the line through the first two points if there is no third one or it lies on the line, else the parabola
    through all three points. `values` are the values at the batch sizes `sizes`."""
    (a, b), (x, y) = values[:2], sizes[:2]
    slope = (b - a) / (y - x)
    line = BatchPolynomial(a - slope * x, slope)
    if len(values) == 2:
        return line
    c, z = values[2], sizes[2]
    square = ((c - b) / (z - y) - slope) / (z - x)
    if abs(square) * z * z <= 1e-9 * max(abs(a), abs(b), abs(c), 1):
        return line
    linear = slope - square * (x + y)
    return BatchPolynomial(a - (linear + square * x) * x, linear, square)


@dataclass(frozen=True)
class SplitMark:
    """Says how an operator or a tensor is affected when the group of modules named `group` is split along the tensor
    axis.

    - `divided`: each rank computes or stores only its part.
    - `divided_with_loss`: the same, but only in plans that keep the scores divided up to the loss (loss parallel). In
      other plans, every rank computes or stores the full operator or tensor.
    - `whole_input`: the tensor is an input of the group that every rank stores in full, even in plans that divide the
      tensors before and after the group along the sequence.
    """

    group: str
    part: Literal["divided", "divided_with_loss", "whole_input"] = "divided"


@dataclass(frozen=True)
class TensorUse:
    """A tensor that an operator reads or writes, and its bytes. `value` is a number that all operators of a step which
    use the same contents have in common: an operator that changes a tensor in place reads one value and writes another
    one. A view is the same value as the tensor that it is a view of. `is_gradient` is True for the gradient of a
    parameter, which outlives the step."""

    value: int
    bytes: BatchPolynomial
    is_gradient: bool = False


@dataclass(frozen=True)
class Operator:
    """One operator of a step, with its costs as functions of the batch size.

    `layer` is the module that ran the operator; in the backward pass, the module whose gradient it computes. `dtype` is
    torch's name of the dtype ("float32", ...), empty if no tensor of the operator is floating-point. `shape` is
    described in `operator_costs.operator_shape`. `split` is None for an operator that no split divides.
    `workspace_bytes` is the memory that the operator allocates on a GPU while it runs. `computes_gradient` is False in
    the forward pass and for operators of the forward pass that the backward pass runs again (recomputation). `reads`
    and `writes` are the tensors that the operator uses; both are empty if that was not recorded. `chunks` is the
    number of chunks in which an operator of a loss in chunks runs one after another, each time with these costs; it is
    0 for other operators. Losses in chunks are never compiled.
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
    chunks: int = 0
    reads: tuple[TensorUse, ...] = field(default=(), compare=False, repr=False)
    writes: tuple[TensorUse, ...] = field(default=(), compare=False, repr=False)

    @property
    def runs(self) -> int:
        """How often the operator runs each time that its segment does."""
        return max(1, self.chunks)


@dataclass(frozen=True)
class MemoryChange:
    """Memory that is allocated (or, if `bytes` is negative, freed) after the first `after_operators` operators of a
    segment.

    A `saved` tensor is kept from the forward pass for the backward pass, a `gradient` is the gradient of a parameter,
    and a `temporary` tensor is allocated and freed within one pass. `layer` is the module whose operator allocated the
    tensor. `tensor_count` tensors of `bytes` each change at once. `split` is None for a tensor that no split divides.
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

    `blocks` are the consecutive equal blocks that the segment stands for, in the order of the forward pass; it is empty
    for a segment outside of these blocks. `unit` is the first of `blocks`, or empty.
    """

    unit: str
    phase: Phase
    blocks: tuple[str, ...]
    operators: tuple[Operator, ...]
    changes: tuple[MemoryChange, ...]

    @property
    def block_count(self) -> int:
        """How often the segment runs in a step: once per block, or once if it lies outside of blocks."""
        return len(self.blocks) or 1


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model. `names` has more than one entry for a tied weight; the optimizer knows it by the
    first."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    trainable: bool


@dataclass(frozen=True)
class ModelProfile:
    """The cost of one training step of a model.

    `blocks` are the modules that are recomputed, or whose sharded weights are gathered, one after another. `structure`
    is None unless the caller of `trace_profile` requested it; splits along the tensor axis and pipeline stages need it.
    `experts` are the mixtures of experts, whose rows were routed evenly.
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
    experts: tuple[RoutedExperts, ...] = ()

    @property
    def parameter_count(self) -> int:
        """Number of elements of all parameters, tied weights counted once."""
        return sum(prod(parameter.shape) for parameter in self.parameters)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, tied weights counted once."""
        return sum(parameter.bytes for parameter in self.parameters)

    @property
    def has_convolutions(self) -> bool:
        return any(operator.kind == "convolution" for segment in self.segments for operator in segment.operators)

    def flops(self, batch: float, phase: Phase | None = None) -> float:
        """FLOPs of one step, or of one of its two passes."""
        return sum(
            segment.block_count * sum(operator.runs * operator.flops.at(batch) for operator in segment.operators)
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
