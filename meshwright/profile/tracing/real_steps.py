"""The profile of a model whose shapes depend on its data, from real steps on the device that the model is on.

A step is recorded with all samples of the sample batch and, if there is more than one, with half of them. Operators of
the two steps are matched by pass, module and name. Each quantity of a matched operator becomes the line through its two
values. An operator that one of the steps runs more often (a loop over samples, an expert that received no token) has no
match, and its quantities are taken as proportional to the batch. So are all quantities of a model that does not run
with half of the samples, because its batch has a fixed size, or is one graph.
"""

import copy
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blocks.kept_results import kept_results
from meshwright.blocks.recompute import Recompute, find_blocks
from meshwright.dtypes import HALF_DTYPES
from meshwright.errors import InputError, NotPredictable
from meshwright.profile.experts import find_expert_layers, routed_experts, routed_note
from meshwright.profile.fake import tensor_bytes
from meshwright.profile.structure.model_structure import ModelStructure
from meshwright.profile.tracing.real_tensors import (
    GpuRulesForRealTensors,
    batch_of_samples,
    has_values,
    model_device,
    preserved_random_state,
    sample_count,
)
from meshwright.profile.tracing.recorder import RecordedOperator, StepTrace, record_step
from meshwright.profile.tracing.step import LossFunction, compute_loss
from meshwright.profile.tracing.trace import memory_role, model_parameters, trace_profile
from meshwright.profile.values import BatchPolynomial, MemoryChange, ModelProfile, Operator, Phase, TraceSegment
from meshwright.user.code import describe_error

_NO_DEVICE = (
    "it was built without values (on the meta device), so no real step can be measured: write the plan yourself, with"
    " the axes replicate or shard"
)


def trace_or_measure_profile(
    model: nn.Module,
    sample: Any,
    loss: LossFunction | None,
    *,
    precision: str = "fp32",
    on_gpu: bool = True,
    target: str | None = None,
    recompute: Recompute = "none",
    with_structure: bool = False,
    model_structure: ModelStructure | None = None,
    is_linear: bool = False,
) -> tuple[ModelProfile, str]:
    """Returns the profile of a model, and a phrase for the user that says how the profile was obtained. It is traced if
    that is possible, else measured; a measured profile has no structure. A model without values cannot be measured. If
    its code reads values, it is traced with assumed ones. The arguments are those of `trace_profile`."""
    try:
        profile = trace_profile(
            model,
            sample,
            loss,
            precision=precision,
            on_gpu=on_gpu,
            target=target,
            recompute=recompute,
            with_structure=with_structure,
            model_structure=model_structure,
            is_linear=is_linear,
        )
    except Exception as problem:  # whatever the model's own code raises on tensors without values
        error = problem if isinstance(problem, InputError) else _not_traced(problem)
        if not has_values(model, sample):
            try:
                profile = trace_profile(
                    model,
                    sample,
                    loss,
                    precision=precision,
                    on_gpu=on_gpu,
                    target=target,
                    recompute=recompute,
                    is_linear=is_linear,
                    assumes_values=True,
                )
            except Exception:
                raise NotPredictable(f"{error}, and {_NO_DEVICE}") from problem
            return profile, f"traced steps at {_batches(profile)}, in which conditions on values are false"
        try:
            profile = measure_profile(
                model, sample, loss, precision=precision, on_gpu=on_gpu, target=target, recompute=recompute
            )
        except InputError:
            # The first error names the module, and a batch that does not fit fails in both.
            raise NotPredictable(str(error)) from problem
        return profile, f"measured steps at {_batches(profile)}"
    routed = routed_note(find_expert_layers(model))
    return profile, f"traced steps at {_batches(profile)}{f', {routed}' if routed else ''}"


def _not_traced(error: Exception) -> InputError:
    return InputError(f"the model cannot be traced: {describe_error(error)}")


def _batches(profile: ModelProfile) -> str:
    *others, largest = profile.traced_batches
    return f"batches {', '.join(str(size) for size in others)} and {largest}" if others else f"batch {largest}"


def measure_profile(
    model: nn.Module,
    sample: Any,
    loss: LossFunction | None,
    *,
    precision: str = "fp32",
    on_gpu: bool = True,
    target: str | None = None,
    recompute: Recompute = "none",
) -> ModelProfile:
    """Returns the profile of a model from real steps of a copy. Neither the model nor the state of the random
    generators changes. If `on_gpu` is True and the model is on a CPU, attention, dropout and dtypes are those of a GPU,
    but the fused RMS norm of a GPU is not imitated."""
    if not has_values(model, sample):
        raise InputError(f"the model cannot be measured: {_NO_DEVICE}")
    size = sample_count(sample)
    device = model_device(model)

    def record(batch: Any) -> StepTrace:
        return _record_real_step(model, batch, loss, precision, on_gpu, target, recompute)

    whole = batch_of_samples(sample, size, device)
    trace, half = record(whole), None
    half_bytes = 0
    if size > 1:
        try:
            batch = batch_of_samples(sample, size // 2, device)
            half, half_bytes = _HalfBatch(size // 2, record(batch)), tensor_bytes(batch)
        except Exception:
            half = None
    return ModelProfile(
        precision=precision,
        parameters=model_parameters(model),
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        input_bytes=_fit_line(tensor_bytes(whole), size, half_bytes, half),
        segments=_segments(trace, size, half),
        traced_batches=(size // 2, size) if half else (size,),
        recompute=recompute,
        blocks=find_blocks(model),
        experts=routed_experts(model),
    )


# ---- one real step


def failure_of_step(
    model: nn.Module, sample: Any, loss: LossFunction | None, precision: str, target: str | None = None
) -> str | None:
    """Returns why a real step of the model on its device fails in this precision; None if it runs, or if it lacks
    memory, which says nothing about the precision."""
    device = model_device(model)
    try:
        batch = batch_of_samples(sample, sample_count(sample), device)
        model_copy = copy.deepcopy(model, kept_results(model))
        loss_copy = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss
        with preserved_random_state(device), torch.enable_grad():
            compute_loss(_UnderAutocast(model_copy, device, precision), batch, loss_copy, "fp32", target).backward()
    except (torch.OutOfMemoryError, MemoryError):
        return None
    except Exception as error:  # whatever the model's own code raises
        return describe_error(error)
    return None


def _record_real_step(
    model: nn.Module,
    batch: Any,
    loss: LossFunction | None,
    precision: str,
    on_gpu: bool,
    target: str | None,
    recompute: Recompute,
) -> StepTrace:
    device = model_device(model)
    try:
        model_copy = copy.deepcopy(model, kept_results(model))
        loss_copy = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss  # it may have buffers and weights
    except Exception as error:
        raise InputError(f"the model cannot be copied: {describe_error(error)}") from error
    names = {module: name for name, module in model_copy.named_modules()}
    rules = GpuRulesForRealTensors() if on_gpu and device.type == "cpu" else nullcontext()
    autocast_model = _UnderAutocast(model_copy, device, precision)

    def run(_: nn.Module) -> Tensor:
        return compute_loss(autocast_model, batch, loss_copy, "fp32", target)

    try:
        with preserved_random_state(device), torch.enable_grad(), rules:
            return record_step(model_copy, run, batch, names, recompute=recompute)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"a real step of the model fails: {describe_error(error)}") from error


class _UnderAutocast(nn.Module):
    """Runs the model under autocast for the device that it is on, in the plan's precision."""

    def __init__(self, model: nn.Module, device: torch.device, precision: str) -> None:
        super().__init__()
        self.model, self.device, self.dtype = model, device, HALF_DTYPES.get(precision)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            return self.model(*args, **kwargs)


# ---- combining the traces of the whole batch and of half of it

_OperatorKey = tuple[Phase, str, str]  # pass, module, name of the operator


@dataclass(frozen=True)
class _HalfBatch:
    """The recorded step with half of the samples. `size` is their number."""

    size: int
    trace: StepTrace


def _fit_line(value: float, size: int, at_half: float | None, half: _HalfBatch | None) -> BatchPolynomial:
    """Returns the line through `value` at the batch size `size` and `at_half` at half of it. Returns a line through
    zero if there is no second value, or if the slope or the constant would be negative, which happens if the data
    influence the quantity."""
    if half is None or at_half is None:
        return BatchPolynomial(0, value / size)
    slope = (value - at_half) / (size - half.size)
    constant = value - slope * size
    return BatchPolynomial(constant, slope) if slope >= 0 and constant >= 0 else BatchPolynomial(0, value / size)


def _segments(trace: StepTrace, size: int, half: _HalfBatch | None) -> tuple[TraceSegment, ...]:
    """Returns two segments: the forward pass and the backward pass."""
    begin = trace.backward_begin
    matches = _matches(_operator_keys(trace), _operator_keys(half.trace) if half else [])
    operators = [
        _combine_operator(operator, size, half.trace.operators[match] if half and match is not None else None, half)
        for operator, match in zip(trace.operators, matches, strict=True)
    ]
    changes = _changes(trace, size, half)
    forward = [change for change in changes if change.after_operators <= begin]
    backward = [
        replace(change, after_operators=change.after_operators - begin)
        for change in changes
        if change.after_operators > begin
    ]
    return (
        TraceSegment("", "forward", (), tuple(operators[:begin]), tuple(forward)),
        TraceSegment("", "backward", (), tuple(operators[begin:]), tuple(backward)),
    )


def _operator_keys(trace: StepTrace) -> list[_OperatorKey]:
    return [
        ("forward" if number < trace.backward_begin else "backward", operator.origin.layer, operator.name)
        for number, operator in enumerate(trace.operators)
    ]


def _matches(keys: list[Any], others: list[Any]) -> list[int | None]:
    """For each of `keys`, the index of the matching entry of `others`: the n-th occurrence of a key matches its n-th
    occurrence there. None for a key that does not occur equally often in both."""
    counts, other_counts = Counter(keys), Counter(others)
    occurrences: Counter[Any] = Counter()
    indices = {}
    for index, key in enumerate(others):
        indices[key, occurrences[key]] = index
        occurrences[key] += 1
    numbers = {key: count() for key in counts}
    return [indices[key, next(numbers[key])] if counts[key] == other_counts[key] else None for key in keys]


def _combine_operator(
    operator: RecordedOperator, size: int, at_half: RecordedOperator | None, half: _HalfBatch | None
) -> Operator:
    """Returns one operator with its costs as functions of the batch size, given its recording at the whole batch and,
    unless None, at half of the batch."""
    has_same_dims = at_half is not None and len(at_half.shape) == len(operator.shape)
    half_shape = at_half.shape if at_half and has_same_dims else (None,) * len(operator.shape)
    return Operator(
        layer=operator.origin.layer,
        name=operator.name,
        kind=operator.kind,
        dtype=operator.dtype,
        flops=_fit_line(operator.flops, size, at_half.flops if at_half else None, half),
        bytes=_fit_line(operator.bytes, size, at_half.bytes if at_half else None, half),
        shape=tuple(_fit_line(a, size, b, half) for a, b in zip(operator.shape, half_shape, strict=True)),
        workspace_bytes=_fit_line(operator.workspace_bytes, size, at_half.workspace_bytes if at_half else None, half),
        computes_gradient=operator.origin.computes_gradient,
    )


def _changes(trace: StepTrace, size: int, half: _HalfBatch | None) -> list[MemoryChange]:
    allocating = _allocating_operators(trace)
    half_allocating = _allocating_operators(half.trace) if half else {}
    half_allocations = list(half_allocating)
    matches = dict(zip(allocating, _matches(list(allocating.values()), list(half_allocating.values())), strict=True))
    changes: list[MemoryChange] = []
    sizes: dict[int, BatchPolynomial] = {}  # by allocation
    for number, event in enumerate(trace.memory):
        allocation = number if event.allocation is None else event.allocation
        role = memory_role(trace, allocation)
        if allocation not in sizes:
            match = matches[allocation]
            at_half = half.trace.memory[half_allocations[match]].bytes if half and match is not None else None
            is_gradient = role == "gradient"
            sizes[allocation] = (
                BatchPolynomial(event.bytes, 0) if is_gradient else _fit_line(event.bytes, size, at_half, half)
            )
        sign = 1 if event.allocation is None else -1
        change = BatchPolynomial(sign * sizes[allocation].constant, sign * sizes[allocation].linear)
        changes.append(MemoryChange(event.after_operators, change, role, trace.memory[allocation].origin.layer))
    return changes


def _allocating_operators(trace: StepTrace) -> dict[int, _OperatorKey]:
    """For each event that is an allocation, by its index: the key of the operator that allocated the memory."""
    keys: list[_OperatorKey] = [("forward", "", ""), *_operator_keys(trace)]
    return {
        number: keys[event.after_operators] for number, event in enumerate(trace.memory) if event.allocation is None
    }
