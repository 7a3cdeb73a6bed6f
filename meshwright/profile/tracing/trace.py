"""`trace_profile`: the profile of a model, from a few training steps on fake tensors. No memory is allocated, and of
consecutive equal blocks only three are traced.

The step is traced at three batch sizes. Every quantity (FLOPs, bytes, sizes) becomes the straight line through its
first two values if the third value lies on that line (`fit_batch_polynomial`). Otherwise the model compares samples
with each other, and the quantity becomes the parabola through all three values. The step is then traced at a fourth
batch size, where the bytes of every operator must lie on their parabola (`_check_fourth_batch`).
"""

import traceback
from collections.abc import Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from meshwright.blocks.module_names import is_inside
from meshwright.blocks.recompute import Recompute, find_blocks
from meshwright.dtypes import torch_name
from meshwright.errors import InputError
from meshwright.model_io.batch import target_key
from meshwright.profile.equal_blocks import EqualBlocks, find_equal_blocks, remove_skipped_blocks, skipped_blocks
from meshwright.profile.experts import routed_experts
from meshwright.profile.fake import (
    FakeRules,
    fake_batch,
    fake_model,
    is_dense,
    one_sequence_per_row,
    reads_values,
    tensor_bytes,
)
from meshwright.profile.gpu_rules import GpuRules
from meshwright.profile.structure.model_structure import ModelStructure
from meshwright.profile.structure.split_marks import SplitMarks, find_split_marks
from meshwright.profile.torch_private import DataDependentOutputException, FakeTensorMode
from meshwright.profile.tracing.recorder import (
    RecordedOperator,
    RecordedUse,
    RulesContext,
    StepTrace,
    StorageEvent,
    record_step,
)
from meshwright.profile.tracing.step import LossFunction, compute_loss
from meshwright.profile.values import (
    BatchPolynomial,
    MemoryChange,
    MemoryRole,
    ModelProfile,
    Operator,
    Parameter,
    Phase,
    TensorUse,
    TraceSegment,
    fit_batch_polynomial,
)
from meshwright.user.code import first_line

BATCHES = (2, 3, 5)
CHECK_BATCH = 7


@dataclass(frozen=True)
class _SegmentRange:
    """The operators [begin, end) of a trace that become one `TraceSegment`, which stands for all of `blocks`."""

    unit: str
    phase: Phase
    blocks: tuple[str, ...]
    begin: int
    end: int

    @property
    def block_count(self) -> int:
        return len(self.blocks) or 1

    def contains(self, event: StorageEvent) -> bool:
        """Whether the event belongs to an operator of this range. An event that is recorded after an operator and
        before the next one belongs to the former. Events before the first operator of the step belong to the first
        range."""
        after = event.after_operators
        return self.begin < after <= self.end or (after == 0 and self.begin == 0)


def trace_profile(
    model: nn.Module,
    sample: Any,
    loss: LossFunction | None,
    *,
    precision: str = "fp32",
    on_gpu: bool = True,
    target: str | None = None,
    recompute: Recompute = "none",
    with_structure: bool = False,
    merge_equal_blocks: bool = True,
    model_structure: ModelStructure | None = None,
    is_linear: bool = False,
    assumes_values: bool = False,
) -> ModelProfile:
    """Returns the profile of a model on batches like `sample`, which may have any number of samples.

    If `with_structure` is True, the profile includes the `Structure` of the model, which says how it can be split and
    cut; it is taken from `model_structure` if that is given. If `merge_equal_blocks` is False, every block is traced.
    `target` is the key of the targets in the batch. `is_linear`: a profile with less recomputation, which has the same
    operators, has shown that all quantities are linear; two batch sizes are then enough. `assumes_values` is that of
    `FakeRules`; the profile then has no structure. The model may be on the meta device; it is not changed.
    """
    if not is_dense([*model.parameters(), *model.buffers(), sample]):
        raise InputError("the model cannot be traced, because some of its tensors are sparse")
    sizes = BATCHES[:2] if is_linear else BATCHES
    rules = GpuRules if on_gpu else FakeRules
    step = _FakeStep(model, sample, loss, precision, target, recompute, partial(rules, assumes_values=assumes_values))
    equal_blocks = find_equal_blocks(model) if merge_equal_blocks else ()
    try:
        traces, ranges = _trace_all_batches(step, sizes, equal_blocks)
    except (InputError, LookupError):
        # A model that indexes its blocks by number fails without the skipped ones, and blocks that are never called,
        # or frozen, do not appear in both passes. Such a model is traced with all its blocks.
        if not equal_blocks:
            raise
        merge_equal_blocks, equal_blocks = False, ()
        traces, ranges = _trace_all_batches(step, sizes, equal_blocks)
    marks, structure = SplitMarks({}, {}, {}, {}), None
    if with_structure and not assumes_values:
        known = model_structure or ModelStructure(model, sample, target_key(target, loss is not None))
        # Recomputation repeats operators, and changes none of the first forward pass.
        marks = known.split_marks((precision, on_gpu, id(loss), equal_blocks), partial(step.split_marks, equal_blocks))
        structure = known.find(merge_equal_blocks)
    segments = _combine(traces, sizes, ranges, marks)
    profile = ModelProfile(
        precision=precision,
        parameters=model_parameters(model),
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        input_bytes=_input_bytes(sample),
        segments=segments,
        traced_batches=sizes,
        recompute=recompute,
        blocks=find_blocks(model),
        structure=structure,
        experts=routed_experts(model),
    )
    if has_squares(profile):
        _check_fourth_batch(profile, step.trace(CHECK_BATCH, equal_blocks), ranges)
    return profile


@dataclass(frozen=True)
class _FakeStep:
    """A training step that can be traced on fake tensors at any batch size. `rules` makes the context in which the
    forward pass runs the operators of the target device (`GpuRules`, or nothing for a CPU)."""

    model: nn.Module
    sample: Any
    loss: LossFunction | None
    precision: str
    target: str | None
    recompute: Recompute
    rules: RulesContext

    def loss_of(self, module: nn.Module, batch: Any) -> Tensor:
        return compute_loss(module, batch, self.loss, self.precision, self.target)

    def split_marks(self, equal_blocks: tuple[EqualBlocks, ...]) -> SplitMarks:
        with self.rules(), one_sequence_per_row(self.sample):
            return find_split_marks(self.model, self.sample, self.loss_of, BATCHES[0], equal_blocks)

    def trace(self, size: int, equal_blocks: tuple[EqualBlocks, ...]) -> StepTrace:
        """Records one step of a fake copy of the model without the skipped blocks, with `size` samples."""
        with one_sequence_per_row(self.sample):
            return self._trace(size, equal_blocks)

    def _trace(self, size: int, equal_blocks: tuple[EqualBlocks, ...]) -> StepTrace:
        mode = FakeTensorMode()
        fake = fake_model(self.model, mode, skipped_blocks(equal_blocks), size)
        names = {module: name for name, module in fake.named_modules()}
        remove_skipped_blocks(fake, equal_blocks)
        batch = fake_batch(self.sample, size, mode)
        blocks = {name for row in equal_blocks for name in (row.first, row.middle, row.last)}
        run = partial(self.loss_of, batch=batch)
        try:
            with mode:
                return record_step(fake, run, batch, names, blocks, self.recompute, self.rules)
        except InputError:
            raise
        except Exception as error:
            reason = reads_values(error) if isinstance(error, DataDependentOutputException) else first_line(error)
            raise InputError(f"{_failing_module(error, names)}: {reason}") from error


def _trace_all_batches(
    step: _FakeStep, sizes: tuple[int, ...], equal_blocks: tuple[EqualBlocks, ...]
) -> tuple[list[StepTrace], list[_SegmentRange]]:
    """Returns the traces of the step at all sizes, and the ranges of operators that become segments."""
    traces = [step.trace(size, equal_blocks) for size in sizes]
    return traces, _segment_ranges(traces[0], equal_blocks)


def _failing_module(error: Exception, names: dict[nn.Module, str]) -> str:
    """Returns the beginning of an error message that names the module which could not be traced: the innermost module
    whose forward function is in the error's traceback."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(module, nn.Module):
            name = names.get(module, "")
            return f"the model cannot be traced in {name or 'its forward pass'} ({type(module).__name__})"
    return "the model cannot be traced"


# ---- dividing a step into segments


_Edge = tuple[int, tuple[str, ...]]  # the number of a segment's first operator, and the segment's blocks


def _segment_ranges(trace: StepTrace, equal_blocks: tuple[EqualBlocks, ...]) -> list[_SegmentRange]:
    """Returns the ranges of both passes. Raises a LookupError if one of the passes does not contain a block."""
    begins, ends, backward_begin = trace.blocks_begin, trace.blocks_end, trace.backward_begin
    rows = [(begins[row.first], row) for row in equal_blocks]
    forward: list[_Edge] = [(0, ())]
    for begin, row in sorted(rows, key=lambda item: item[0]):
        forward += [
            (begin, (row.first,)),
            (begins[row.middle], row.blocks[1:-1]),
            (begins[row.last], (row.last,)),
            (ends[row.last], ()),
        ]
    backward: list[_Edge] = [(backward_begin, ())]
    for _, row in sorted(rows, key=lambda item: -item[0]):
        backward += [
            (_backward_operators(trace, row.last)[0], (row.last,)),
            (_backward_operators(trace, row.middle)[0], row.blocks[1:-1]),
            (_backward_operators(trace, row.first)[0], (row.first,)),
            (_backward_operators(trace, row.first)[-1] + 1, ()),
        ]
    return [
        *_ranges_between(forward, backward_begin, "forward"),
        *_ranges_between(backward, len(trace.operators), "backward"),
    ]


def _ranges_between(edges: list[_Edge], end: int, phase: Phase) -> list[_SegmentRange]:
    return [
        _SegmentRange(blocks[0] if blocks else "", phase, blocks, begin, next_begin)
        for (begin, blocks), (next_begin, _) in pairwise([*edges, (end, ())])
    ]


def _backward_operators(trace: StepTrace, block: str) -> list[int]:
    """The numbers of the operators in the backward pass that belong to a block."""
    numbers = range(trace.backward_begin, len(trace.operators))
    return [number for number in numbers if is_inside(trace.operators[number].origin.layer, block)]


# ---- combining the traces of three batch sizes


def _combine(
    traces: list[StepTrace], sizes: tuple[int, ...], ranges: list[_SegmentRange], marks: SplitMarks
) -> tuple[TraceSegment, ...]:
    first = traces[0]
    for other in traces[1:]:
        same = [o.name for o in other.operators] == [o.name for o in first.operators]
        if not same or len(other.memory) != len(first.memory):
            raise InputError(
                "the model runs different operators for different batch sizes: its cost cannot be derived from traces"
                f" of small batches ({', '.join(map(str, sizes))})"
            )
    operators = [
        _combine_operator([trace.operators[number] for trace in traces], sizes, marks, first.gradients.keys())
        for number in range(len(first.operators))
    ]
    event_ranges = [next(candidate for candidate in ranges if candidate.contains(event)) for event in first.memory]
    changes: dict[_SegmentRange, list[MemoryChange]] = {segment: [] for segment in ranges}
    for number, (event, segment) in enumerate(zip(first.memory, event_ranges, strict=True)):
        # Memory that every block allocates, but that is freed outside of blocks (a cache of weights, say), is freed
        # once per block.
        is_freed_outside = not segment.unit and event.allocation is not None
        count = event_ranges[event.allocation or 0].block_count if is_freed_outside else 1
        change = _combine_change(first, number, [trace.memory[number].bytes for trace in traces], sizes, marks)
        changes[segment].append(
            replace(change, after_operators=change.after_operators - segment.begin, tensor_count=count)
        )
    return tuple(
        TraceSegment(
            segment.unit,
            segment.phase,
            segment.blocks,
            tuple(operators[segment.begin : segment.end]),
            tuple(changes[segment]),
        )
        for segment in ranges
    )


def _combine_operator(
    recorded: list[RecordedOperator], sizes: tuple[int, ...], marks: SplitMarks, gradients: Set[int]
) -> Operator:
    """Returns one operator with its costs as functions of the batch size, given its recordings at each batch size.
    `gradients` are the allocations that became gradients of parameters."""
    first = recorded[0]
    shapes = zip(*(operator.shape for operator in recorded), strict=True)
    return Operator(
        layer=first.origin.layer,
        name=first.name,
        kind=first.kind,
        dtype=first.dtype,
        flops=fit_batch_polynomial([operator.flops for operator in recorded], sizes),
        bytes=fit_batch_polynomial([operator.bytes for operator in recorded], sizes),
        shape=tuple(fit_batch_polynomial(list(values), sizes) for values in shapes),
        split=marks.operators.get(first.origin.forward_number),
        workspace_bytes=fit_batch_polynomial([operator.workspace_bytes for operator in recorded], sizes),
        computes_gradient=first.origin.computes_gradient,
        reads=_combine_uses([operator.reads for operator in recorded], sizes, gradients),
        writes=_combine_uses([operator.writes for operator in recorded], sizes, gradients),
    )


def _combine_uses(
    recorded: list[tuple[RecordedUse, ...]], sizes: tuple[int, ...], gradients: Set[int]
) -> tuple[TensorUse, ...]:
    fitted = [fit_batch_polynomial([use.bytes for use in uses], sizes) for uses in zip(*recorded, strict=False)]
    return tuple(
        TensorUse(use.value, size, use.allocation in gradients) for use, size in zip(recorded[0], fitted, strict=True)
    )


def _combine_change(
    trace: StepTrace, number: int, bytes_by_size: list[int], sizes: tuple[int, ...], marks: SplitMarks
) -> MemoryChange:
    """Returns one change of memory as a function of the batch size, given the bytes of the event `number` at each batch
    size."""
    event = trace.memory[number]
    allocation = number if event.allocation is None else event.allocation
    role = memory_role(trace, allocation)
    origin = trace.memory[allocation].origin
    if role == "gradient":
        split = marks.parameters.get(trace.gradients[allocation])
    else:
        split = (marks.inputs if origin.computes_gradient else marks.results).get(origin.forward_number)
    size = fit_batch_polynomial(bytes_by_size, sizes)
    return MemoryChange(event.after_operators, size, role, origin.layer, split=split)


def memory_role(trace: StepTrace, allocation: int) -> MemoryRole:
    """The role of the tensor that the event with the index `allocation` allocated."""
    if allocation in trace.gradients:
        return "gradient"
    return "saved" if allocation in trace.saved else "temporary"


def has_squares(profile: ModelProfile) -> bool:
    """Whether the work of an operator grows with the square of the batch."""
    return any(o.flops.square or o.bytes.square for segment in profile.segments for o in segment.operators)


def _check_fourth_batch(profile: ModelProfile, trace: StepTrace, ranges: list[_SegmentRange]) -> None:
    if len(trace.operators) != max((indices.end for indices in ranges), default=0):
        raise InputError(
            f"the model runs other operators on {CHECK_BATCH} samples than on smaller batches, so its cost cannot be"
            " derived from traces of small batches"
        )
    for segment, indices in zip(profile.segments, ranges, strict=True):
        recorded = trace.operators[indices.begin : indices.end]
        for operator, at_fourth in zip(segment.operators, recorded, strict=True):
            if abs(operator.bytes.at(CHECK_BATCH) - at_fourth.bytes) > 0.5:
                raise InputError(
                    f"{operator.layer or 'the model'}: the cost of {operator.name} grows neither linearly nor"
                    " quadratically with the batch, so it cannot be derived from traces of small batches"
                )


# ---- the other fields of a profile


def model_parameters(model: nn.Module) -> tuple[Parameter, ...]:
    """All parameters of a model. A tied weight is listed once, with all its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    return tuple(
        Parameter(
            names=tuple(names[key]),
            shape=tuple(tensor.shape),
            dtype=torch_name(tensor.dtype),
            bytes=tensor.numel() * tensor.element_size(),
            trainable=tensor.requires_grad,
        )
        for key, tensor in tensors.items()
    )


def _input_bytes(sample: Any) -> BatchPolynomial:
    return fit_batch_polynomial([tensor_bytes(fake_batch(sample, size, FakeTensorMode())) for size in BATCHES], BATCHES)
