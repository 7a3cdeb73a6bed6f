"""The comparison in a plan's own precision, step by step from the same weights.

Gradients must be equal up to what rounding may change (`compare/rounding.py`). The update is then compared more
strictly, because it is computed in fp32: the reference's optimizer takes its step with the plan's gradients, and its
weights must equal the plan's within the tolerance of fp32 sums. The next step starts from the plan's weights and
buffers, because otherwise two trainings that round differently would drift apart.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.proof.compare.errors import ComparedKind, layer_scales, scaled_error
from meshwright.proof.compare.rounding import (
    NOISE_PASSES,
    SAFETY_FACTOR,
    SPACING,
    PartialSumLayers,
    RoundingAllowance,
    RoundingNoise,
    TensorError,
    communication_rounding,
    inject_rounding_noise,
    partial_sum_layers,
    rms_scales,
    rounding_allowance,
    rounding_noise,
    tensor_error,
)
from meshwright.proof.compare.step_comparator import losses_by_rank
from meshwright.proof.compare.tolerance import LAMBDA, count_reductions
from meshwright.proof.proof import Proof
from meshwright.proof.reference.groups import (
    GlobalBatch,
    choose_grouping,
    describe_grouping,
    uses_batch_statistics,
)
from meshwright.proof.reference.reference import preserve_generators
from meshwright.proof.reference.reference_setup import build_setup
from meshwright.proof.reference.rounded_reference import RoundedReference
from meshwright.proof.reference_comparison import ReferenceComparison
from meshwright.proof.request import ProofRequest
from meshwright.train.output.record_file import RecordedStep
from meshwright.train.output.recording import count_recorded_steps, read_start, read_step

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class StepNoise:
    """The noise that is injected into a step. `of_fan_in` returns the noise of a layer, given its fan-in.
    `of_gradients` is the noise of the gradients of weights. `partial_sums` are the layers in which ranks add up partial
    sums."""

    of_fan_in: Callable[[int], RoundingNoise]
    of_gradients: RoundingNoise
    partial_sums: PartialSumLayers


def compare_rounded(request: ProofRequest, folder: Path, device: torch.device) -> Proof:
    """Returns the proof for the steps that `record` wrote to the folder, without a cause."""
    with preserve_generators(device):
        return _RoundedComparison(request, device).run(folder)


class _RoundedComparison(ReferenceComparison[RoundedReference]):
    """Compares recorded steps with those of a `RoundedReference`, up to the first step that differs."""

    def __init__(self, request: ProofRequest, device: torch.device) -> None:
        setup = build_setup(request)
        setup.model.train()
        plan = request.plan
        grouping = choose_grouping(setup.model, plan, request.dropout, setup.compares_samples)
        if grouping == "whole" and plan.batch_parts > 1 and not setup.compares_samples:
            grouping = "local"  # so that the reference rounds the same microbatches as the ranks do
        reference = RoundedReference(setup, request, grouping, device)
        batch_statistics = any(uses_batch_statistics(module) for module in setup.model.modules())
        is_worth_a_note = batch_statistics or request.dropout
        note = describe_grouping(grouping, plan, batch_statistics) if is_worth_a_note else None
        super().__init__(request, setup, reference, note)
        self.skipped_steps = 0

    def run(self, folder: Path) -> Proof:
        self._compare_start(read_start(folder))
        steps = count_recorded_steps(folder)
        for step in range(1, steps + 1):
            if self.differs:
                break
            self._step(step, read_step(folder, step))
        if self.skipped_steps == steps:
            raise InputError(f"fp16 overflowed in all of {steps} steps, so there is nothing to compare: choose bf16")
        if self.skipped_steps:
            self.notes.append(
                f"{self.skipped_steps} further steps were skipped by the ranks and by one device: fp16 overflowed"
            )
        precision = self.request.plan.numerics.precision
        tolerance_is = (
            f"{SAFETY_FACTOR:g} × what {NOISE_PASSES} more roundings ({SPACING[precision]:.2g}) of all layers do to a"
            " gradient's size"
        )
        return self.make_proof(precision, tolerance_is)

    def _compare_start(self, recorded: RecordedStep) -> None:
        """Compares the initial weights and buffers. They must be equal to the last bit, because both sides build the
        same model."""
        for name, expected in self.reference_state().items():
            for rank, state in _states_by_rank(recorded, name):
                self._add(0, "initial weight", name, scaled_error(state.get(name), expected, 1.0), rank)

    def _step(self, step: int, recorded: RecordedStep) -> None:
        """Computes the reference's step and compares it with the recorded one."""
        reference = self.reference
        batch = reference.next_batch()
        before = self.reference_state()
        with count_reductions(reference.model) as counter:
            loss = reference.compute(batch)
        is_finite = bool(recorded.gradients)
        if reference.gradients_are_finite != is_finite:
            # Near the largest number of fp16, rounding decides whether a gradient overflows. With half or twice the
            # loss scale, rounding does not decide it any more.
            self._load(before)
            reference.loss_scale_factor = 0.5 if is_finite else 2.0
            loss = reference.compute(batch)
        if reference.gradients_are_finite != is_finite:
            self.notes.append(f"step {step} overflowed on {'one device' if is_finite else 'the ranks'} alone")
            self._add(step, "gradient norm", None, math.inf)
            return
        if not is_finite:
            self._skip_step(recorded, batch)
            return
        terms = counter.tolerance(len(batch.groups), torch.float32).terms
        partial_sums = partial_sum_layers(reference.model, recorded.observations[0].split_dims or {})
        noise = self._step_noise(terms, partial_sums)
        self._compare_values(step, recorded, batch, loss, before, noise)
        if self.differs:
            return
        self._compare_update(step, recorded, batch)
        reference.update_loss_scale(True)

    def _compare_values(
        self, step: int, recorded: RecordedStep, batch: GlobalBatch, loss: Tensor, before: Tensors, noise: StepNoise
    ) -> None:
        """Compares loss, gradients and buffers with the reference's, up to what rounding may change."""
        gradients, buffers = self.reference.gradients(), self._buffers()
        allowance = self._measure_allowance(batch, loss, {**gradients, **buffers}, before, noise)
        self.comparator.raise_tolerance(allowance.typical_projection)
        for rank, rank_loss in losses_by_rank(recorded):
            self._add_number(step, "loss", rank_loss, loss, allowance.numbers["loss"], rank)
        self._compare_tensors(step, "gradient", recorded.gradients, gradients, allowance)
        for rank, values in recorded.differing_gradients.items():
            self._compare_tensors(step, "gradient", values, _only(gradients, values), allowance, rank)
        for name in recorded.gradients.keys() - gradients.keys():
            self._add(step, "gradient", name, tensor_error(recorded.gradients[name], None, 1.0).spread)
        self._compare_tensors(step, "buffer", recorded.state, buffers, allowance)
        for rank, values in recorded.differing_states.items():
            self._compare_tensors(step, "buffer", values, _only(buffers, values), allowance, rank)
        self._compare_integers(step, recorded)

    def _skip_step(self, recorded: RecordedStep, batch: GlobalBatch) -> None:
        """Skips a step that overflowed both on the ranks and on one device."""
        self.skipped_steps += 1
        self._load(recorded.state)
        self.reference.update_loss_scale(False)
        self.reference.skip_update(batch.last_of_epoch)

    def _step_noise(self, terms: int, partial_sums: PartialSumLayers) -> StepNoise:
        """Returns the noise of a step whose gradients of weights are sums of `terms` terms."""
        plan, device_type = self.request.plan, self.reference.device.type
        return StepNoise(
            lambda fan_in: rounding_noise(plan, fan_in, device_type),
            rounding_noise(plan, terms, device_type),
            partial_sums,
        )

    def _measure_allowance(
        self, batch: GlobalBatch, loss: Tensor, expected: Tensors, before: Tensors, noise: StepNoise
    ) -> RoundingAllowance:
        """Computes the step again several times with noise, and returns the errors that rounding explains. Afterwards
        the reference has the same weights, buffers and gradients as before."""
        reference, after = self.reference, self.reference_state()
        gradients = {name: parameter.grad for name, parameter in reference.model.named_parameters()}
        scales, part_sizes = rms_scales(expected), reference.part_sizes
        passes: list[dict[str, TensorError]] = []
        numbers: list[dict[str, float]] = []
        for number in range(NOISE_PASSES):
            self._load(before)
            seed = 1000 * reference.steps + number
            with inject_rounding_noise(reference.model, noise.of_fan_in, noise.partial_sums, seed):
                noisy_loss = reference.compute(batch)
            generator = torch.Generator().manual_seed(seed)
            noisy = {name: noise.of_gradients.add_to(value, generator) for name, value in reference.gradients().items()}
            noisy |= self._buffers()
            passes.append({name: tensor_error(noisy.get(name), expected[name], scales[name]) for name in expected})
            numbers.append({"loss": _relative_error(noisy_loss, loss)})
        self._load(after)
        for name, parameter in reference.model.named_parameters():
            parameter.grad = gradients[name]
        communication = communication_rounding(self.request.plan)
        sizes = {name: part_sizes.get(name, 0.0) / scale if scale else 0.0 for name, scale in scales.items()}
        smallest = {name: math.hypot(noise.of_gradients.rms, communication * size) for name, size in sizes.items()}
        return rounding_allowance(passes, numbers, expected, smallest)

    def _compare_tensors(
        self,
        step: int,
        what: ComparedKind,
        actual: Tensors,
        expected: Tensors,
        allowance: RoundingAllowance,
        rank: int = 0,
    ) -> None:
        """Compares from the last tensor to the first. The error that is noted for a tensor is its error divided by the
        allowed one, times the comparison's tolerance. Therefore it is above the tolerance if it is more than
        allowed."""
        scales = rms_scales(expected)
        for name in reversed(expected):
            share = allowance.used_share(name, tensor_error(actual.get(name), expected[name], scales[name]))
            self._add(step, what, name, share * self.comparator.comparison.tolerance, rank)

    def _compare_integers(self, step: int, recorded: RecordedStep) -> None:
        """Compares integer buffers (such as counters), which must be equal."""
        for name, expected in self.reference_state().items():
            if not expected.is_floating_point():
                for rank, state in _states_by_rank(recorded, name):
                    self._add(step, "buffer", name, scaled_error(state.get(name), expected, 1.0), rank)

    def _add_number(
        self, step: int, what: ComparedKind, actual: Tensor, expected: Tensor, allowed: float, rank: int = 0
    ) -> None:
        error = _relative_error(actual, expected)
        share = error / allowed if allowed else (math.inf if error else 0.0)
        self._add(step, what, None, share * self.comparator.comparison.tolerance if error else 0.0, rank)

    def _compare_update(self, step: int, recorded: RecordedStep, batch: GlobalBatch) -> None:
        """Takes the reference's optimizer step with the plan's gradients, compares the resulting weights with the
        plan's, and then loads the plan's weights and buffers into the reference."""
        reference, eps = self.reference, SPACING["fp32"]
        for name, parameter in reference.model.named_parameters():
            gradient = recorded.gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter)
        elements = sum(parameter.numel() for parameter in reference.model.parameters())
        norm = reference.clip()
        if recorded.norm is not None:
            self._add_number(step, "gradient norm", recorded.norm, norm, LAMBDA * math.sqrt(elements) * eps)
        before = self.reference_state()
        reference.update(batch.last_of_epoch)
        after = self.reference_state()
        tolerance = self.comparator.comparison.tolerance
        for name, scale in layer_scales({name: after[name] for name in self.comparator.parameters}).items():
            change = float((after[name] - before[name]).abs().max())
            # Where an optimizer divides small numbers by each other, the rounding of the norm affects the whole update.
            allowed = LAMBDA * eps * (scale + math.sqrt(elements) * change)
            for rank, state in _states_by_rank(recorded, name):
                error = scaled_error(state.get(name), after[name], 1.0)
                self._add(step, "weight", name, error / allowed * tolerance if error else 0.0, rank)
        self._load(recorded.state)

    def _load(self, state: Tensors) -> None:
        self.reference.model.load_state_dict(state, strict=False)

    def _buffers(self) -> Tensors:
        """Copies of the floating-point buffers that are part of the state dict, on the CPU."""
        saved = self.reference.model.state_dict().keys()
        buffers = self.reference.model.named_buffers()
        return {
            name: buffer.detach().cpu().clone()
            for name, buffer in buffers
            if name in saved and buffer.is_floating_point()
        }

    def _add(self, step: int, what: ComparedKind, parameter: str | None, error: float, rank: int = 0) -> None:
        self.comparator.add(step, what, parameter, error, rank)


def _states_by_rank(recorded: RecordedStep, name: str) -> list[tuple[int, Tensors]]:
    """Returns pairs (rank, weights and buffers by name): rank 0's, and those of the ranks that have a different value
    under `name`."""
    differing = [(rank, state) for rank, state in recorded.differing_states.items() if name in state]
    return [(0, recorded.state), *differing]


def _only(expected: Tensors, actual: Tensors) -> Tensors:
    """The expected tensors whose names are among the actual ones."""
    return {name: value for name, value in expected.items() if name in actual}


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    size = abs(float(expected))
    difference = abs(float(actual) - float(expected))
    return difference / size if size else (math.inf if difference else 0.0)


def with_exact_cause(proof: Proof, exact: Proof) -> Proof:
    """Returns the proof with the cause that `exact`, the same comparison in fp64, has found. If `exact` has no
    difference, the cause is the precision."""
    first, exact_first = proof.first_difference, exact.first_difference
    assert first is not None
    if exact_first is None:
        explanation = (
            f"in {exact.dtype} the plan trains as one device does: what differs is what {proof.dtype} makes of it"
        )
        first = replace(first, cause="low_precision", explanation=explanation)
    else:
        explanation = f"in {exact.dtype}: {exact_first.explanation}"
        ruled_out, fitting = exact_first.ruled_out, exact_first.fitting
        first = replace(first, cause=exact_first.cause, explanation=explanation, ruled_out=ruled_out, fitting=fitting)
    return replace(proof, comparison=replace(proof.comparison, first_difference=first))
